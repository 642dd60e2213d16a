"""Takes the outputs of compare, sweep and experiment anew that README.md shows. For a quiet machine; some 20 minutes.

    python tests/bench/retake_readme.py            # prints them
    python tests/bench/retake_readme.py --write    # puts them into README.md, behind their marks
    python tests/bench/retake_readme.py --only experiment --write

Each block stands behind a mark such as `<!-- output: compare -->`. Figures hold for the machine that they are taken on,
which README.md names under Speed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from harness import Service, service

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SESSIONS, TURNS, CLIENTS = 48, 4, 4
WIDTH = "112"


def flowinfer(*arguments: str, cwd: Path, **env: str) -> str:
    """What a command prints. Raises RuntimeError with it when it fails."""
    command = [sys.executable, "-m", "flowinfer", *arguments]
    more = {"COLUMNS": WIDTH, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | more)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}:\n{done.stdout}{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")


def block(mark: str) -> list[str]:
    """The words of the command behind a mark of README.md, less `flowinfer`."""
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"README.md has no block behind {mark}"
    return shlex.split(found[1].replace("\\\n", " "))[1:]


def compare(folder: Path) -> str:
    """The author's day, whose last step this is."""
    flowinfer(*block("day: new"), cwd=folder)
    flowinfer(*block("day: test"), cwd=folder)
    return flowinfer(*block("day: compare"), cwd=folder)


def sweep(folder: Path) -> str:
    return flowinfer(*block("command: sweep"), cwd=folder, COLUMNS="160")


def experiment(folder: Path) -> str:
    """A service that many sessions talk to, the experiment laid over it while they do, and its report."""
    env = {"XDG_STATE_HOME": str(folder)}
    os.environ |= env
    overlay = "pipelines/experiments/live-no-speculation.yaml"
    with service("prod.yaml") as running:
        talk(running, sessions=4)  # warms up
        sets = ["--set", "serve.port=0", "--set", "experiment.split=50%", "--set", "experiment.stop_if={}"]
        flowinfer("apply", overlay, "--service", str(running.process.pid), "--yes", *sets, cwd=folder, **env)
        talk(running, SESSIONS)
        report = flowinfer("experiment", "report", "--html", "experiment.html", cwd=folder, **env)
        flowinfer("experiment", "stop", "--service", str(running.process.pid), "--yes", cwd=folder, **env)
    return report


def talk(running: Service, sessions: int) -> None:
    """Chats of a few turns each, CLIENTS at a time; each conversation is a session."""
    left = iter(range(sessions))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            chat(running, number)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def chat(running: Service, number: int) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": QUESTIONS[(number + turn) % len(QUESTIONS)]})
        body = {"model": running.model, "messages": messages, "max_tokens": 48, "user": f"visitor {number}"}
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=600)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


QUESTIONS = (
    "Tell me a short story about a brave mouse.",
    "What is the capital of France?",
    "Write three short paragraphs about a silver bell, a red kite and telling the truth.",
    "What is the opposite of big?",
    "Tell me a short story about a kind bear who finds a hat.",
    "Give me a recipe for pancakes.",
    "Write a short story about a rabbit who learns to sing.",
)
TAKES: dict[str, Callable[[Path], str]] = {"compare": compare, "sweep": sweep, "experiment": experiment}


def put(name: str, text: str) -> None:
    """Replaces the block behind a mark."""
    mark = re.escape(f"<!-- output: {name} -->")
    page = README.read_text()
    new, count = re.subn(rf"({mark}\n```\w*\n).*?(```)", lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL)
    assert count == 1, f"README.md has no block behind <!-- output: {name} -->"
    README.write_text(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into README.md")
    parser.add_argument("--only", choices=[*TAKES], action="append", help="take this one alone")
    arguments = parser.parse_args()
    for name in arguments.only or TAKES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "pipelines").symlink_to(ROOT / "pipelines")
            text = TAKES[name](Path(folder))
        print(f"## {name}\n{text}\n", flush=True)
        if arguments.write:
            put(name, text)


if __name__ == "__main__":
    main()

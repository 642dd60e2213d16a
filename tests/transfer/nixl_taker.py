"""A process with a pool that others write to by NIXL; answers a line of JSON for each that it reads. For tests."""

from __future__ import annotations

import base64
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from flowinfer.message import KVPushed
from flowinfer.transfer import nixl
from flowinfer.transfer.transport import DamagedBlock

NUM_BLOCKS, SHAPE = 16, (3, 256)


def engine(worker: str, generation: int, **more: Any) -> Any:
    """As much of an engine as transports use; blocks of zeros."""
    kv = torch.zeros((NUM_BLOCKS, *SHAPE), dtype=torch.float32)
    shared: dict[object, Any] = {}

    def share(key: object, make: Any, *, arms: bool = False) -> Any:
        if key not in shared:
            shared[key] = make()
        return shared[key]

    settings = [{"interfaces": ["lo"]}]
    context = SimpleNamespace(worker=worker, generation=generation, shared=share, settings_of=lambda kind: settings)
    layout = SimpleNamespace(block_bytes=kv[0].numel() * 4, digest="test")
    return SimpleNamespace(kv=kv, layout=layout, ctx=SimpleNamespace(**vars(context), **more))


def main() -> None:
    """Until its input ends."""
    here = engine("taker", int(sys.argv[1]))
    receiver = nixl.make_receiver(here)
    for line in sys.stdin:
        what = json.loads(line)
        answer: Any = None
        if what["ask"] == "address":
            answer = base64.b64encode(receiver.address()).decode()
        elif what["ask"] == "sums":
            answer = here.kv.flatten(1).double().sum(1).tolist()
        elif what["ask"] == "land":
            said = KVPushed(id="r", ticket=1, first=what["first"], checks=what["checks"])
            try:
                answer = list(receiver.land(said, what["targets"]))
            except DamagedBlock as error:
                answer = str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

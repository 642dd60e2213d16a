"""A pipeline file and all that is laid over it, as one resolved document. Leaves the meaning of stages to the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import path as paths
from pathlib import Path

from flowinfer.errors import Mark, Problem, SpecError
from flowinfer.spec.merge import SET, merge, sets_tree, strip_drops
from flowinfer.spec.models import ArmOverlay
from flowinfer.spec.sections import Sections, read_sections
from flowinfer.spec.tree import Node, read_tree
from flowinfer.spec.variables import fill_in


@dataclass(frozen=True)
class Document:
    """A resolved document. sources: text of each file for showing lines; problems: mistakes of syntax and structure.

    arm: what arm B of its experiment is, as a document of its own; without an experiment, None.
    """

    file: str
    root: Node
    sections: Sections
    sources: Mapping[str, str]
    problems: tuple[Problem, ...]
    allow_local: bool = False
    arm: Document | None = None

    def mark(self, *path: str) -> Mark:
        """Where the key of this path stands; of what isn't written, its nearest parent."""
        for end in range(len(path), -1, -1):
            if node := self.root.at(*path[:end]):
                return node.where if end else Mark(self.file, 1, 1)
        return Mark(self.file, 1, 1)

    def value_mark(self, *path: str) -> Mark:
        """Where the value of this path stands; of what isn't written, as `mark`."""
        node = self.root.at(*path)
        return node.mark if node else self.mark(*path)

    def base(self, mark: Mark) -> Path:
        """The folder that a relative path written at `mark` starts from."""
        return Path.cwd() if mark.file == SET else Path(mark.file).parent


def load(
    path: str | Path, overlays: Iterable[str | Path] = (), sets: Sequence[str] = (), allow_local: bool = False
) -> Document:
    """The document of `path` with overlays and `--set` options laid over it, in this order.

    Mistakes that leave a document stand in its `problems`. Raises SpecError when a file can't be read as YAML at all.
    """
    loader = _Loader()
    chain = loader.chain(str(path))
    # An overlay on the command line is laid over this file: what it extends itself stays out.
    chain += [tree for overlay in overlays if (tree := loader.read(str(overlay), None))]
    if loader.unreadable or not chain:
        raise SpecError(loader.problems)
    root = strip_drops(chain[0], loader.problems)
    for over in chain[1:]:
        root = merge(root, over, loader.problems)
    raw = loader.apply_sets(root, sets)
    if (experiment := raw.map.get("experiment")) is not None and experiment.value is None:
        raw = _without_experiment(raw)  # as of --set experiment=null
    document = loader.document(raw, str(path), allow_local)
    if document.sections.experiment is None or loader.unreadable:
        return document
    laid_over = loader.arm(raw)
    if laid_over is None:
        return replace(document, problems=tuple(loader.problems))
    merged = merge(_without_experiment(raw), laid_over, loader.problems)
    return replace(document, arm=loader.document(merged, str(path), allow_local))


class _Loader:
    """Reads files and what they extend, and keeps their text."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.unreadable = False

    def chain(self, file: str) -> list[Node]:
        """The file's tree behind those of all that it extends, the deepest first."""
        trees: list[Node] = []
        seen: list[str] = []
        mark: Mark | None = None
        while True:
            if paths.realpath(file) in seen:
                self.problems.append(Problem("FI112", f"{file} extends itself by way of others.", mark))
                return trees
            seen.append(paths.realpath(file))
            tree = self.read(file, mark)
            if tree is None:
                return trees
            trees.insert(0, tree)
            extends = tree.map.get("extends")
            if extends is None or not isinstance(extends.value, str):
                return trees
            mark = extends.mark
            file = paths.normpath(Path(file).parent / Path(extends.value).expanduser())

    def read(self, file: str, user: Mark | None) -> Node | None:
        """The tree of a file; None, with problems, when there is none. user: who extends it."""
        try:
            text = Path(file).read_bytes().decode("utf-8-sig")
        except (OSError, ValueError) as error:
            self.refuse(_read_problem(file, user, error))
            return None
        self.sources[file] = text
        tree, problems = read_tree(text, file)
        self.problems += problems
        if tree is None:
            self.unreadable = True
        elif not isinstance(tree.value, dict):
            help = "Start with `flowinfer: 1`."
            self.refuse(Problem("FI203", "A pipeline file is a map of sections.", tree.mark, help))
            return None
        return tree

    def document(self, raw: Node, path: str, allow_local: bool) -> Document:
        """The document of a merged tree, its variables filled in."""
        found = list(self.problems)
        root = fill_in(raw, found)
        sections, problems = read_sections(root, path, self.sources)
        known = {problem.mark for problem in found}
        found += [problem for problem in problems if problem.mark not in known]
        return Document(path, root, sections, self.sources, tuple(found), allow_local)

    def arm(self, raw: Node) -> Node | None:
        """What arm B lays over the file; None, with problems, when its file can't be taken."""
        over = raw.at("experiment", "with")
        assert over is not None, "the section was read"
        if not isinstance(over.value, str):
            return over
        base = Path.cwd() if over.mark.file == SET else Path(over.mark.file).parent
        file = paths.normpath(base / Path(over.value).expanduser())
        tree = self.read(file, over.mark)
        if tree is None:
            return None
        # As with -o: what the overlay extends itself stays out, and so does its name.
        members = {key: node for key, node in tree.map.items() if key not in ("extends", "name", "flowinfer")}
        for key, node in members.items():
            if key not in ArmOverlay.model_fields:
                message = f"An arm of an experiment can't change `{key}`, which both arms share."
                help = f"It may hold {', '.join(ArmOverlay.model_fields)}."
                self.problems.append(Problem("FI218", message, node.where, help, ((over.mark, "it is named here"),)))
        return tree.with_map({key: node for key, node in members.items() if key in ArmOverlay.model_fields})

    def refuse(self, problem: Problem) -> None:
        self.unreadable = True
        self.problems.append(problem)

    def apply_sets(self, root: Node, sets: Sequence[str]) -> Node:
        self.sources[SET] = "\n".join(" ".join(text.splitlines()) for text in sets)
        for over in self.take(*sets_tree(sets, root)):
            root = merge(root, over, self.problems)
        return root

    def take(self, nodes: list[Node], problems: list[Problem]) -> list[Node]:
        self.problems += problems
        return nodes


def _without_experiment(root: Node) -> Node:
    return root.with_map({key: node for key, node in root.map.items() if key != "experiment"})


def _read_problem(file: str, user: Mark | None, error: Exception) -> Problem:
    reason, help = str(error), "Give a file of YAML text."
    if isinstance(error, UnicodeDecodeError):
        reason, help = f"it isn't UTF-8 (byte {error.start})", "Save it as UTF-8."
    elif isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        if isinstance(error, FileNotFoundError):
            help = "Check the path and its case."
        elif isinstance(error, PermissionError):
            help = "Make it readable."
    if user:
        return Problem("FI112", f"{file}, which this names, can't be read: {reason}.", user)
    return Problem("FI101", f"{file} can't be read: {reason}.", Mark(file, 1, 1), help)

"""Turns a graph without problems into the plan that workers are started from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flowinfer.errors import SpecError
from flowinfer.graph.agreement import lanes_of, unit_of
from flowinfer.graph.checker import check
from flowinfer.graph.facets import FacetFlow
from flowinfer.graph.inherit import filled_root
from flowinfer.graph.invariance import kernels_of
from flowinfer.graph.model import Graph, StageNode, Wire
from flowinfer.graph.placement import workers
from flowinfer.graph.plan import API, FRONT, EdgePlan, NetworkPlan, Plan, ServePlan, StagePlan, WorkerPlan
from flowinfer.spec import Document, load
from flowinfer.spec.models import Edge
from flowinfer.units import format_duration

DEFAULT_CAPACITY = 256
# Prompts that a prefill worker may hold a bucket: enough to fill a step with short ones. More would only take them from
# the sender's queues, where another worker could still have them.
BUCKET_CAPACITY = 16


def load_plan(
    path: str | Path, overlays: Iterable[str | Path] = (), sets: Sequence[str] = (), allow_local: bool = False
) -> Plan:
    """The plan of a file with what is laid over it. Raises SpecError with every mistake in it."""
    return build_plan(load(path, overlays, sets, allow_local))


def build_plan(document: Document) -> Plan:
    """The plan of a document. Raises SpecError with every mistake in it."""
    return plan_of(check(document))


def plan_of(graph: Graph) -> Plan:
    """The plan of a checked graph. Raises SpecError when the check found problems."""
    if graph.problems:
        raise SpecError(graph.problems)
    if graph.twin is not None:
        from flowinfer.graph.join import join_arms

        return join_arms(_plan(graph), _plan(graph.twin.graph), graph, graph.twin)
    return _plan(graph)


def joined(graph: Graph) -> Graph:
    """The graph with both arms of its experiment, if it has one, to be shown."""
    if graph.twin is None:
        return graph
    from flowinfer.graph.join import drawn

    return drawn(plan_of(graph), graph, graph.twin)


def _plan(graph: Graph) -> Plan:
    """The plan of a graph, or of one arm."""
    document, flow = graph.document, FacetFlow(graph)
    return Plan(
        name=document.sections.name,
        digest=_digest(graph),
        file=str(Path(document.file).resolve()),
        stages={name: _stage(graph.stages[name]) for name in flow.order} | {API: _api(graph)},
        edges=tuple(_edge(graph, flow, wire) for wire in graph.wires),
        workers=_workers(graph, flow.order),
        serve=_serve(document),
        network=_network(document),
        allow_local=document.allow_local,
        kernels=kernels_of(graph) if document.sections.batch_invariant else "",
    )


def _digest(graph: Graph) -> str:
    """16 hex characters that name the resolved document, wherever its values were written."""
    root = filled_root(graph)
    arm_a = {key: node.plain() for key, node in root.map.items() if key != "experiment"}
    text = json.dumps(arm_a, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stage(stage: StageNode) -> StagePlan:
    config = stage.config.model_dump(mode="json", by_alias=True) if stage.config else {}
    return StagePlan(name=stage.name, kind=stage.kind, config=config, worker=stage.worker or "", mark=str(stage.mark))


# Settings of the stage that tokenizes which the front needs to count as it does.
_CHAT = {"template", "recipe", "template_args", "tool_parser", "reasoning_parser"}


def _api(graph: Graph) -> StagePlan:
    """The HTTP front: its settings are the `serve` section and the models that the stages name."""
    serve = graph.document.sections.serve
    models = dict.fromkeys(getattr(stage.config, "model", "") for stage in graph.stages.values())
    config = {
        "apis": list(serve.apis),
        "models": [model for model in models if model],
        "max_requests": serve.max_requests,
        "request_timeout": format_duration(serve.request_timeout),
        "max_body": f"{serve.max_body}B",
        "keepalive": format_duration(serve.keepalive),
        "tools": any(getattr(stage.config, "tool_parser", "none") != "none" for stage in graph.stages.values()),
    }
    chats = [s.config for s in graph.stages.values() if s.config is not None and hasattr(s.config, "template_args")]
    if chats and (chat := chats[0].model_dump(mode="json", include=_CHAT, exclude_defaults=True)):
        config["chat"] = chat
    return StagePlan(name=API, kind=API, config=config | _extras(graph.document), worker=FRONT)


def _extras(document: Document) -> dict[str, Any]:
    """Settings of the front that most files don't have."""
    serve = document.sections.serve
    found = {
        "sampling": serve.sampling.model_dump(exclude_none=True) if serve.sampling else {},
        "keys": dict(serve.keys),
        "key_requests": serve.key_requests,
        "key_rate": serve.key_rate,
        "cors": list(serve.cors),
        "tls_cert": _file(document, serve.tls.cert, "cert") if serve.tls else "",
        "tls_key": _file(document, serve.tls.key, "key") if serve.tls else "",
        **_state(document),
    }
    return {name: value for name, value in found.items() if value}


def _state(document: Document) -> dict[str, Any]:
    state = document.sections.serve.state
    found: dict[str, Any] = {f"state_{name}": format_duration(getattr(state, name)) for name in ("responses", "files")}
    if not state.path:
        return found
    base = document.base(document.value_mark("serve", "state", "path"))
    return found | {"state_path": str((base / Path(state.path).expanduser()).resolve())}


def _file(document: Document, path: str, key: str) -> str:
    return str((document.base(document.value_mark("serve", "tls", key)) / Path(path).expanduser()).resolve())


def _edge(graph: Graph, flow: FacetFlow, wire: Wire) -> EdgePlan:
    assert wire.out and wire.into, "an edge without ports passed the check"
    options = wire.options
    unit = unit_of(graph, wire) or "messages"
    lanes = lanes_of(flow.sources(wire, "bucket")[0]) if options.by("bucket") else ("",)
    return EdgePlan(
        name=wire.name,
        source=wire.source,
        target=wire.target,
        message=wire.out.message.__name__,
        port=wire.into.name,
        dispatch=options.dispatch,
        key=options.key or "",
        lanes=lanes,
        capacity=options.capacity or _capacity(unit, options),
        unit=unit,
        back=options.back,
        fused=graph.is_fused(wire),
    )


def _capacity(unit: str, options: Edge) -> int:
    if unit == "blocks":
        return 1  # the consumer offers its blocks once it knows how many it has
    return BUCKET_CAPACITY if options.by("bucket") else DEFAULT_CAPACITY


def _workers(graph: Graph, order: list[str]) -> dict[str, WorkerPlan]:
    declared = workers(graph)
    loading = {s.worker for s in graph.stages.values() if s.contract and s.contract.model and s.contract.model.weights}
    models, memory = sum(declared[name].replicas for name in loading if name), _memory_tier(graph)
    plans = {}
    for name, worker in declared.items():
        plans[name] = WorkerPlan(
            name=name,
            stages=tuple(stage for stage in order if graph.stages[stage].worker == name),
            replicas=worker.replicas,
            # A worker that loads no weights has no use for a device; `auto` is looked up when the service starts.
            device=worker.device if name in loading or worker.device != "auto" else "cpu",
            threads=share(worker.threads, _num_cores(), models) if name in loading else worker.threads or 1,
            kv_bytes=worker.kv_memory,
            tier_bytes=memory // models if name in loading else 0,
            log_level=worker.log_level or "",
            mark=str(graph.document.mark("workers", name)),
        )
    return plans


def _memory_tier(graph: Graph) -> int:
    """Bytes of the host's memory tier, which is the KV memory of its workers: what no request holds is cache."""
    sizes = [getattr(getattr(stage.config, "tiers", None), "memory", 0) for stage in graph.stages.values()]
    return int(max(sizes, default=0))


def share(asked: int, cores: int, engines: int) -> int:
    """Torch threads of a process that runs a model: as asked, else its part of the cores.

    Other processes take little of them, and threads spin for each other so shortly that a core lost now and then
    costs what it computes for somebody else (see runtime.threads).
    """
    return asked or max(1, cores // max(1, engines))


def _num_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(document: Document) -> ServePlan:
    serve = document.sections.serve
    return ServePlan(
        host=serve.host,
        port=serve.port,
        apis=tuple(serve.apis),
        max_requests=serve.max_requests,
        request_timeout_s=serve.request_timeout,
        drain_timeout_s=serve.drain_timeout,
        stop_timeout_s=serve.stop_timeout,
        drain=serve.drain,
        log_level=serve.log_level,
        tls=serve.tls is not None,
    )


def _network(document: Document) -> NetworkPlan:
    network = document.sections.network
    if network.curve is None:
        return NetworkPlan(transport=network.transport, bind=network.bind)
    secret = document.base(document.value_mark("network", "curve", "secret_key_file")) / network.curve.secret_key_file
    return NetworkPlan(
        transport=network.transport,
        bind=network.bind,
        curve_public_key=network.curve.public_key,
        curve_secret_key_file=str(Path(secret).expanduser().resolve()),
    )

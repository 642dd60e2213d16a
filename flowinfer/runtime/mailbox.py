"""Opens the mailbox of a process as the plan's network says."""

from __future__ import annotations

from pathlib import Path

from flowinfer.channel import Channel, Endpoints, Keys
from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import NetworkPlan


def bind(channel: Channel, network: NetworkPlan, run_dir: Path) -> Endpoints:
    """Opens the mailbox where the plan says."""
    return channel.bind_ipc(run_dir) if network.transport == "ipc" else channel.bind_tcp(network.bind)


def load_keys(network: NetworkPlan) -> Keys | None:
    """The CURVE keys of the service, None when it has none. Raises FlowInferError when the file can't be read."""
    if not network.curve_public_key:
        return None
    path = Path(network.curve_secret_key_file).expanduser()
    try:
        return Keys(network.curve_public_key, path.read_text().strip())
    except OSError as error:
        raise FlowInferError(f"the CURVE key file {path} can't be read: {error.strerror}.") from error

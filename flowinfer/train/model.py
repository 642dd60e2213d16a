"""The trainable twin of engine.models.deepseek_v4: whole sequences, dense masks, gradients; parameters named as in
checkpoints.

All experts are computed for all tokens and masked: at this size one large product beats sixteen gathers.
Dimensions: B sequences, S tokens (whole blocks of the window), N heads, D head size, E entries, X experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowinfer.engine.models.deepseek_v4 import ops
from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.train.sinkhorn import sinkhorn

Rotation = tuple[Tensor, Tensor]


def close_groups(rows: Tensor, bias: Tensor, norm: Tensor, overlap: bool, eps: float) -> Tensor:
    """Entries [B, S / rate, D] of value and gate rows [B, S, 2 * channels], not rotated yet."""
    rate = bias.shape[0]
    values, gates = torch.unflatten(rows, 1, (-1, rate)).chunk(2, -1)
    gates = gates + bias
    if overlap:
        half = values.shape[-1] // 2
        before = F.pad(values[:, :-1, :, :half], (0, 0, 0, 0, 1, 0))
        closed = F.pad(gates[:, :-1, :, :half], (0, 0, 0, 0, 1, 0), value=-torch.inf)
        values = torch.cat((before, values[..., half:]), 2)
        gates = torch.cat((closed, gates[..., half:]), 2)
    return ops.rms(ops.pool(values, gates), norm, eps)


def attend(
    q: Tensor, kv: Tensor, sinks: Tensor, documents: Tensor, window: int, entries: Tensor | None, rate: int
) -> tuple[Tensor, Tensor | None]:
    """[B, S, N, D], and the shares that each token gives the entries, summed over heads [B, S, E].

    q [B, S, N, D], kv [B, S, D], documents int [B, S]: a token sees its own document only.
    """
    batch, size, heads, dim = q.shape
    blocks = size // window
    qs = q.view(batch, blocks, window, heads, dim).transpose(2, 3)
    near = kv.view(batch, blocks, window, dim)
    keys = torch.cat((F.pad(near[:, :-1], (0, 0, 0, 0, 1, 0)), near), 2)
    own = documents.view(batch, blocks, window)
    theirs = torch.cat((F.pad(own[:, :-1], (0, 0, 1, 0), value=-1), own), 2)
    here, there = torch.arange(window, device=q.device), torch.arange(2 * window, device=q.device)
    band = (there > here[:, None]) & (there <= here[:, None] + window)
    seen = band & (own.unsqueeze(-1) == theirs.unsqueeze(-2))
    scores = qs @ keys.unsqueeze(2).transpose(-1, -2) * dim**-0.5
    parts = [scores.float().masked_fill(~seen.unsqueeze(2), -torch.inf)]
    if entries is not None:
        far = torch.einsum("bgnwd,bed->bgnwe", qs, entries) * dim**-0.5
        visible = entry_mask(documents, rate).view(batch, blocks, 1, window, -1)
        parts.append(far.float().masked_fill(~visible, -torch.inf))
    parts.append(sinks.view(1, 1, heads, 1, 1).expand(batch, blocks, heads, window, 1))
    shares = torch.cat(parts, -1).softmax(-1)
    out = shares[..., : 2 * window].to(kv.dtype) @ keys.unsqueeze(2)
    given = None
    if entries is not None:
        chosen = shares[..., 2 * window : -1]
        out = out + torch.einsum("bgnwe,bed->bgnwd", chosen.to(kv.dtype), entries)
        given = chosen.sum(2).flatten(1, 2).detach()
    return out.transpose(2, 3).reshape(batch, size, heads, dim), given


def entry_mask(documents: Tensor, rate: int) -> Tensor:
    """bool [B, S, E]: entries whose group has ended and began in the token's own document."""
    size = documents.shape[1]
    closed = (torch.arange(size, device=documents.device) + 1) // rate
    number = torch.arange(size // rate, device=documents.device)
    return (number < closed[:, None]) & (documents[:, ::rate].unsqueeze(1) == documents.unsqueeze(2))


def index_loss(q: Tensor, keys: Tensor, weigh: Tensor, given: Tensor, documents: Tensor, rate: int) -> Tensor:
    """Cross-entropy of the indexer's choice against the attention that was paid (DeepSeek-V3.2's warm-up)."""
    scores = F.relu(torch.einsum("bshd,bed->bshe", q, keys)) * q.shape[-1] ** -0.5
    scores = (scores * weigh.unsqueeze(-1)).sum(2).float()
    mask = entry_mask(documents, rate)
    logs = scores.masked_fill(~mask, -1e4).log_softmax(-1)
    total = given.sum(-1, keepdim=True)
    wanted = given / total.clamp(min=1e-6)
    loss: Tensor = -(wanted * logs).sum(-1).mean()
    return loss


def all_experts(x: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float) -> Tensor:
    """Sum over experts of weight * expert(x): x [T, H], weights [T, X], w1, w3 [X, F, H], w2 [X, H, F]."""
    gate, up = F.linear(x, w1.flatten(0, 1)), F.linear(x, w3.flatten(0, 1))
    inner = torch.unflatten(ops.gated(gate, up, limit), -1, (w1.shape[0], -1)) * weights.unsqueeze(-1).to(x.dtype)
    return F.linear(inner.flatten(-2), w2.permute(1, 0, 2).flatten(1))


class Compressor(nn.Module):
    """wkv and wgate project; ape is the bias of positions in a group."""

    def __init__(self, config: V4Config, rate: int, size: int, overlap: bool) -> None:
        super().__init__()
        channels = size * (2 if overlap else 1)
        self.wkv = nn.Linear(config.hidden_size, channels, bias=False)
        self.wgate = nn.Linear(config.hidden_size, channels, bias=False)
        self.ape = nn.Parameter(torch.zeros(rate, channels))
        self.norm = nn.RMSNorm(size, eps=config.norm_eps)
        self.overlap, self.eps = overlap, config.norm_eps

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        rows = torch.cat((self.wkv(x), self.wgate(x)), -1)
        entries = close_groups(rows, self.ape, self.norm.weight, self.overlap, self.eps)
        cos, sin = (part[:: self.ape.shape[0]] for part in rotation)
        return ops.rotate(entries, cos, sin)


class Indexer(nn.Module):
    """Queries of few small heads over keys from a compressor of its own."""

    def __init__(self, config: V4Config, rate: int) -> None:
        super().__init__()
        self.compressor = Compressor(config, rate, config.index_dim, overlap=True)
        self.wq_b = nn.Linear(config.q_rank, config.index_heads * config.index_dim, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_heads, bias=False)
        self.heads = config.index_heads

    def forward(self, x: Tensor, q_rank: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.unflatten(self.wq_b(q_rank), -1, (self.heads, -1))
        q = ops.rotate(q, *(part.unsqueeze(1) for part in rotation))
        return q, self.compressor(x, rotation), self.weights_proj(x) * self.heads**-0.5


class Attention(nn.Module):
    """One layer's attention, and in training the indexer's loss."""

    def __init__(self, config: V4Config, layer: int) -> None:
        super().__init__()
        self.config, self.rate = config, config.rates[layer]
        heads, hidden = config.num_heads * config.head_dim, config.hidden_size
        sparse = layer in config.sparse_layers
        self.wq_a = nn.Linear(hidden, config.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(config.q_rank, eps=config.norm_eps)
        self.wq_b = nn.Linear(config.q_rank, heads, bias=False)
        self.wkv = nn.Linear(hidden, config.head_dim, bias=False)
        self.norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(config.num_heads))
        self.wo_a = nn.Linear(heads // config.o_groups, config.o_groups * config.o_rank, bias=False)
        self.wo_b = nn.Linear(config.o_groups * config.o_rank, hidden, bias=False)
        self.compressor = Compressor(config, self.rate, config.head_dim, sparse) if self.rate else None
        self.indexer = Indexer(config, self.rate) if sparse else None

    def forward(self, x: Tensor, documents: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
        config, eps = self.config, self.config.norm_eps
        each = tuple(part.unsqueeze(1) for part in rotation)
        q_rank = ops.rms(self.wq_a(x), self.q_norm.weight, eps)
        q = ops.rms(torch.unflatten(self.wq_b(q_rank), -1, (config.num_heads, -1)), None, eps)
        kv = ops.rotate(ops.rms(self.wkv(x), self.norm.weight, eps), *rotation)
        entries = self.compressor(x, rotation) if self.compressor else None
        out, given = attend(
            ops.rotate(q, *each), kv, self.attn_sink, documents, config.window, entries, max(1, self.rate)
        )
        loss = None
        if self.indexer is not None and given is not None and self.training:
            q_index, keys, weigh = self.indexer(x.detach(), q_rank.detach(), rotation)
            loss = index_loss(q_index, keys, weigh, given, documents, self.rate)
        out = torch.unflatten(ops.rotate(out, each[0], -each[1]), 2, (config.o_groups, -1)).flatten(3)
        ranks = torch.unflatten(self.wo_a.weight, 0, (config.o_groups, -1)).to(out.dtype)
        return self.wo_b(torch.einsum("bsgi,gri->bsgr", out, ranks).flatten(2)), loss


class Router(nn.Module):
    """Scores of experts; `load` counts how often each was chosen since it was last read."""

    tid2eid: Tensor
    bias: Tensor
    load: Tensor

    def __init__(self, config: V4Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.hashed = layer in config.hash_layers
        if self.hashed:
            table = torch.stack([torch.randperm(config.num_experts) for _ in range(config.vocab_size)])
            self.register_buffer("tid2eid", table[:, : config.experts_per_token].contiguous())
        else:
            self.register_buffer("bias", torch.zeros(config.num_experts))
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Weights [T, X], zero for experts not chosen."""
        scores = ops.router_scores(x, self.weight.to(x.dtype))
        if self.hashed:
            chosen = self.tid2eid[tokens]
        else:
            chosen = (scores + self.bias).topk(self.config.experts_per_token, -1).indices
        if self.training:
            flat = chosen.flatten()
            self.load.scatter_add_(0, flat, torch.ones_like(flat, dtype=self.load.dtype))
        weights = ops.expert_weights(scores, chosen, self.config.routed_scale)
        return torch.zeros_like(scores).scatter(-1, chosen, weights)


class Experts(nn.Module):
    """w1, w3, w2 of all routed experts, stacked; shared_experts is one more, visited by every token."""

    def __init__(self, config: V4Config, layer: int) -> None:
        super().__init__()
        count, hidden, width = config.num_experts, config.hidden_size, config.expert_size
        self.gate = Router(config, layer)
        self.w1 = nn.Parameter(torch.empty(count, width, hidden))
        self.w3 = nn.Parameter(torch.empty(count, width, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, width))
        self.shared_experts = nn.ModuleDict(
            {
                "w1": nn.Linear(hidden, width, bias=False),
                "w3": nn.Linear(hidden, width, bias=False),
                "w2": nn.Linear(width, hidden, bias=False),
            }
        )
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        flat, shared = x.flatten(0, 1), self.shared_experts
        weights = self.gate(flat, tokens.flatten())
        dtype = flat.dtype
        routed = all_experts(
            flat, weights, self.w1.to(dtype), self.w3.to(dtype), self.w2.to(dtype), self.limit
        ).view_as(x)
        visited: Tensor = shared["w2"](ops.gated(shared["w1"](x), shared["w3"](x), self.limit))
        return routed + visited


class Block(nn.Module):
    """Attention and experts, each between a collapse of the streams and a spread over them."""

    def __init__(self, config: V4Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = Experts(config, layer)
        streams = config.streams
        mixes = (2 + streams) * streams
        for site in ("attn", "ffn"):
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(torch.empty(mixes, streams * config.hidden_size)))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.zeros(mixes)))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.full((3,), 0.1)))

    def forward(self, x: Tensor, tokens: Tensor, documents: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
        """The streams [B, S, M, H] after the block, and in training the indexer's loss where there is one."""
        eps = self.config.norm_eps
        pre, post, comb = self._mix(x, "attn")
        out, loss = self.attn(ops.rms(ops.merge(x, pre), self.attn_norm.weight, eps), documents, rotation)
        x = ops.spread(x, out, post, comb)
        pre, post, comb = self._mix(x, "ffn")
        visited = self.ffn(ops.rms(ops.merge(x, pre), self.ffn_norm.weight, eps), tokens)
        return ops.spread(x, visited, post, comb), loss

    def _mix(self, x: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        weights = [getattr(self, f"hc_{site}_{part}") for part in ("fn", "base", "scale")]
        return ops.stream_weights(
            x,
            *weights,
            iterations=config.sinkhorn_iterations,
            eps=config.hyper_eps,
            norm_eps=config.norm_eps,
            normalise=sinkhorn,
        )


class TrainableV4(nn.Module):
    """Tied embeddings. forward: float32 logits [B, S, V]; documents int [B, S]."""

    main: Tensor
    wide: Tensor

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        wide = config.streams * config.hidden_size
        self.hc_head_fn = nn.Parameter(torch.empty(config.streams, wide))
        self.hc_head_base = nn.Parameter(torch.zeros(config.streams))
        self.hc_head_scale = nn.Parameter(torch.full((1,), 0.1))
        self.register_buffer("main", ops.frequencies(config.main_rope, config.rope_dim), persistent=False)
        self.register_buffer("wide", ops.frequencies(config.compress_rope, config.rope_dim), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        deep = 0.02 * (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and not name.endswith("ape"):
                nn.init.normal_(parameter, 0.0, deep if "wo_b" in name or "w2" in name else 0.02)
            elif name.endswith("_base") and "head" not in name:
                streams = self.config.streams
                nn.init.normal_(parameter, 0.0, 0.5)  # streams that start equal would stay equal
                parameter.data[2 * streams :] += 3 * torch.eye(streams).flatten()

    def hidden(
        self, tokens: Tensor, documents: Tensor, after: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """[B, S, H] before the head, features [B, S, len(after) * H], and in training the indexers' losses.

        Features are the mean of the streams after the layers named, as a draft head reads them.
        """
        config = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        ropes = [ops.rotations(positions, inverse) for inverse in (self.main, self.wide)]
        x = self.embed(tokens)
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        x = x.unsqueeze(2).expand(-1, -1, config.streams, -1).contiguous()
        losses, kept = [], []
        for index, (block, rate) in enumerate(zip(self.layers, config.rates, strict=True)):
            x, loss = block(x, tokens, documents, ropes[1 if rate else 0])
            losses += [] if loss is None else [loss]
            kept += [x.mean(2)] if index in after else []
        weights = self.hc_head_fn, self.hc_head_base, self.hc_head_scale
        streams = ops.head_streams(x, *weights, eps=config.hyper_eps, norm_eps=config.norm_eps)
        features = torch.cat(kept, -1) if kept else x[:, :, 0, :0]
        return ops.rms(streams, self.norm.weight, config.norm_eps), features, losses

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens, documents)[0], self.embed.weight).float()

    @property
    def blocks(self) -> list[Block]:
        """The layers, by type."""
        return [block for block in self.layers if isinstance(block, Block)]

    def checkpoint(self) -> dict[str, Tensor]:
        """Tensors by the names of a checkpoint; experts one by one."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            if ".ffn.w" in name:
                block, part = name.rsplit(".", 1)
                found |= {f"{block}.experts.{i}.{part}.weight": each for i, each in enumerate(tensor)}
            else:
                found[name] = tensor
        return found

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """Takes the tensors of `checkpoint`."""
        found = dict(tensors)
        for name in self.state_dict():
            if ".ffn.w" in name:
                block, part = name.rsplit(".", 1)
                count = self.config.num_experts
                found[name] = torch.stack([found.pop(f"{block}.experts.{i}.{part}.weight") for i in range(count)])
        self.load_state_dict(found)

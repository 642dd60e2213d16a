"""A draft head after DSpark: one pass proposes a block of tokens, with a confidence for each. Verifies nothing.

The head reads the target's residual stream after some of its layers, at the positions that the target has run: features
(concatenated, for hyper-connections the mean of the streams, before any final norm) -> linear -> RMS norm: the context.
Each draft layer makes a key and a value of every context row and of the block itself. The block is the last accepted
token (the anchor, not yet run by the target) and learned masks for the tokens after it; it sees its own rows in both
directions and the `window` context positions before the anchor. Position k of the block gives the logits of token
anchor + k through the target's own head; tokens are chosen left to right, and each adds a bias to the logits of the
next: (W1[previous] + correction) W2, of low rank (a Markov head). Confidence of token k, given that those before it
are accepted: sigmoid(w . [h_k; bias row] / T_k), which never looks at token k itself.

Two things differ from the paper (DSpark, arXiv 2607.05147): the newest context row is added to the block's input, and
the correction, a small recurrent layer over h_k and the tokens chosen so far, makes the bias depend on the context. It
works in the rank's space, so it costs next to nothing; its output starts at zero, where the bias is the paper's.

Dimensions: n sequences, T context rows, W window, B block, H hidden, N heads, K key heads, D head size, R rank,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flowinfer.errors import ModelError

Matrix = Tensor | Callable[[Tensor], Tensor]
Choose = Callable[[int, Tensor], Tensor]
METADATA = "flowinfer_draft"
FORMAT = 1


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a head, as its file's metadata hold them. temperatures: of the confidences, one a token of the block.

    target names the model it was trained for; digest is that of its weights (engine.manifest.digest), or empty.
    """

    target: str
    hidden_size: int
    vocab_size: int
    feature_layers: tuple[int, ...]
    num_layers: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 512
    rank: int = 32
    mixer_size: int = 128
    block: int = 5
    window: int = 128
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    temperatures: tuple[float, ...] = ()
    digest: str = ""
    format: int = FORMAT

    @property
    def feature_size(self) -> int:
        """Width of the features: hidden sizes of all feature layers, in the order of feature_layers."""
        return self.hidden_size * len(self.feature_layers)


class DraftLayer(nn.Module):
    """One transformer layer over the block; `context` makes its keys and values of context rows."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        self.norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.q = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.kv = nn.Linear(hidden, 2 * config.num_kv_heads * dim, bias=False)
        self.kv_context = nn.Linear(hidden, 2 * config.num_kv_heads * dim, bias=False)
        self.k_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.q_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.out = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, hidden, bias=False)

    def context(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated keys and values [..., 2, K, D] of context rows [..., H]; rotation [..., 1, D / 2]."""
        return self._keyed(self.kv_context(rows), rotation)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], context: Tensor, seen: Tensor) -> Tensor:
        """x [n, B, H]; context [n, W, 2, K, D]; seen bool [n, W]."""
        config = self.config
        normed = self.norm(x)
        q = _rotate(self.q_norm(torch.unflatten(self.q(normed), -1, (config.num_heads, -1))), *rotation)
        own = self._keyed(self.kv(normed), rotation)
        keys, values = torch.cat((context, own), 1).permute(2, 0, 3, 1, 4)
        mask = torch.cat((seen, seen.new_ones(x.shape[:2])), 1)[:, None, None]
        grouped = config.num_heads != config.num_kv_heads
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=grouped)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        grown: Tensor = x + self.down(F.silu(gate) * up)
        return grown

    def _keyed(self, projected: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        rows = torch.unflatten(projected, -1, (2, self.config.num_kv_heads, -1))
        keys, values = rows.unbind(-3)
        return torch.stack((_rotate(self.k_norm(keys), *rotation), values), -3)


class MarkovHead(nn.Module):
    """The bias that a chosen token gives to the next one's logits, and the confidence in what will be chosen there."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank, mixed = config.rank, config.mixer_size
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.w2 = nn.Linear(rank, config.vocab_size, bias=False)
        self.mix = nn.Linear(config.hidden_size + 2 * rank, mixed, bias=False)
        self.correct = nn.Linear(mixed, rank, bias=False)
        self.confidence = nn.Linear(config.hidden_size + rank, 1)

    def forward(self, h: Tensor, previous: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Bias row [n, R] for the position of h [n, H] after token `previous` int [n], and its confidence's logit [n].

        before [n, R]: the bias row of the position before, zeros at the first.
        """
        row = self.w1(previous)
        row = row + self.correct(F.silu(self.mix(torch.cat((h, row, before), -1))))
        logit: Tensor = self.confidence(torch.cat((h, row), -1)).squeeze(-1).float()
        return row, logit

    def bias(self, row: Tensor) -> Tensor:
        """Logits' bias [n, V] of a bias row [n, R]."""
        biased: Tensor = self.w2(row)
        return biased


class DraftHead(nn.Module):
    """A head with the target's embedding and output matrix attached. Random weights until a file is loaded.

    Serving uses new_state, DraftState.append and draft; training calls context, keys, hidden and markov itself.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.context_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.anchor_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.masks = nn.Parameter(torch.zeros(config.block - 1, config.hidden_size))
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.markov = MarkovHead(config)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._inverse = 1.0 / config.rope_theta**exponents
        self._embed: Tensor | None = None
        self._lm_head: Callable[[Tensor], Tensor] | None = None
        self._temperatures = torch.tensor(config.temperatures or (1.0,) * config.block)
        self._initialize()

    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
            if name.endswith(("correct.weight", "confidence.bias")):
                nn.init.zeros_(parameter)

    # -------------------------------------------------------------------------------------------------------- serving

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target, from 0, after which its residual stream is read."""
        return self.config.feature_layers

    @property
    def block(self) -> int:
        """Tokens that one pass drafts."""
        return self.config.block

    @property
    def window(self) -> int:
        """Context positions before the anchor that the head sees."""
        return self.config.window

    @classmethod
    def random(
        cls,
        config: HeadConfig,
        embed: Tensor,
        lm_head: Matrix,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        seed: int = 0,
    ) -> DraftHead:
        """An untrained head: its drafts are worthless and everything else is as with a trained one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(config)
        return head._ready(embed, lm_head, device, dtype)

    @classmethod
    def load(
        cls, path: Path, embed: Tensor, lm_head: Matrix, device: torch.device | str, dtype: torch.dtype
    ) -> DraftHead:
        """The head of a file. embed [V, H] and lm_head ([V, H], or a function from [n, H] to [n, V]) are the target's.

        Raises ModelError where the file is no head, or one for a target of another size.
        """
        config, tensors = read(path)
        if tuple(embed.shape) != (config.vocab_size, config.hidden_size):
            raise ModelError(
                f"{path}: the draft head is for {config.target}, with an embedding of "
                f"{[config.vocab_size, config.hidden_size]}; the model's is {list(embed.shape)}.",
                help="Use the head that belongs to the model, or draft: ngram.",
            )
        head = cls(config)
        try:
            head.load_state_dict(tensors)
        except RuntimeError as error:
            raise ModelError(f"{path}: {error}", help="Was the file written by another version?") from error
        return head._ready(embed, lm_head, device, dtype)

    def save(self, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes the head, its sizes and its temperatures as one file."""
        tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.state_dict().items()}
        written = msgspec.json.encode(self.config).decode()
        save_file(tensors, path, metadata={"format": "pt", METADATA: written})

    def attach(self, embed: Tensor, lm_head: Matrix) -> None:
        """Uses the target's embedding and output matrix, which stay the target's."""
        self._embed = embed.detach()  # a parameter would become one of the head's
        self._lm_head = lm_head if callable(lm_head) and not isinstance(lm_head, Tensor) else _Product(lm_head)

    def _ready(self, embed: Tensor, lm_head: Matrix, device: torch.device | str, dtype: torch.dtype) -> DraftHead:
        self.attach(embed, lm_head)
        self.to(device, dtype)
        self._inverse, self._temperatures = self._inverse.to(device), self._temperatures.to(device)
        return self.requires_grad_(False).eval()

    def new_state(self, max_slots: int) -> DraftState:
        """Context of up to max_slots sequences, empty."""
        return DraftState(self, max_slots)

    @torch.inference_mode()
    def draft(
        self, state: DraftState, slots: Tensor, anchors: Tensor, positions: Tensor, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """Proposes tokens int64 [n, B] and their confidences float32 [n, B] for the sequences in `slots` int [n].

        anchors int [n]: the last accepted tokens, at positions int [n], whose features the state can't have yet.
        choose(k, logits) gets the head's float32 logits [n, V] of token anchor + 1 + k, for k = 0 .. B - 1 in this
        order, and returns tokens int [n]: sampling is the caller's. Waits for no device.
        """
        kept, seen, newest = state.read(slots, positions)
        h = self.hidden(anchors, positions, kept, seen, newest)
        logits = self.logits(h)
        tokens, confidences = [], []
        previous, row = anchors, h.new_zeros(h.shape[0], self.config.rank)
        for k in range(self.block):
            row, confidence = self.markov(h[:, k], previous, row)
            previous = choose(k, logits[:, k] + self.markov.bias(row).float()).long()
            tokens.append(previous)
            confidences.append(confidence)
        return torch.stack(tokens, 1), torch.sigmoid(torch.stack(confidences, 1) / self._temperatures)

    # ------------------------------------------------------------------------------------------------------- the pass

    def context(self, features: Tensor) -> Tensor:
        """Context rows [..., H] of features [..., F]."""
        rows: Tensor = self.context_norm(self.fc(features.to(self.fc.weight.dtype)))
        return rows

    def keys(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Keys and values [L, ..., 2, K, D] of context rows [..., H] at positions int [...], for all draft layers."""
        rotation = self._rotation(positions, rows.dtype)
        return torch.stack([layer.context(rows, rotation) for layer in self._layers])

    def hidden(self, anchors: Tensor, positions: Tensor, context: Tensor, seen: Tensor, newest: Tensor) -> Tensor:
        """h [n, B, H] of blocks that begin with anchors int [n] at positions int [n].

        context [L, n, W, 2, K, D] as `keys` gives it, seen bool [n, W] what of it exists, newest [n, H] the context row
        at position - 1, zeros where there is none.
        """
        assert self._embed is not None, "attach() comes first"
        first = self.anchor_norm(F.embedding(anchors, self._embed).to(newest.dtype)).unsqueeze(1)
        x = torch.cat((first, self.masks.to(newest.dtype).expand(len(anchors), -1, -1)), 1) + newest.unsqueeze(1)
        rotation = self._rotation(positions.unsqueeze(1) + torch.arange(self.block, device=x.device), x.dtype)
        for layer, kept in zip(self._layers, context, strict=True):
            x = layer(x, rotation, kept, seen)
        h: Tensor = self.norm(x)
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Float32 logits [n, B, V] without the bias."""
        assert self._lm_head is not None, "attach() comes first"
        return torch.unflatten(self._lm_head(h.flatten(0, 1)).float(), 0, h.shape[:2])

    @property
    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.float().unsqueeze(-1) * self._inverse.to(positions.device)
        return angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2)


class DraftState:
    """Context of the sequences by slot: a ring of `window` rows of keys and values, and the newest row.

    It lives where decoding happens, starts empty whenever a sequence comes to a slot, and never moves: a head drafts
    with as little context as there is. Slot -1 is a spare one, for padding.
    """

    def __init__(self, head: DraftHead, max_slots: int) -> None:
        config, weight = head.config, head.fc.weight
        rows = (max_slots + 1, config.window)
        self._head = head
        self._kept = weight.new_zeros(config.num_layers, *rows, 2, config.num_kv_heads, config.head_dim)
        self._newest = weight.new_zeros(max_slots + 1, config.hidden_size)
        self._newest_at = torch.full((max_slots + 1,), -1, dtype=torch.int64, device=weight.device)
        self._positions = torch.full(rows, -1, dtype=torch.int64, device=weight.device)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self._kept.nbytes + self._newest.nbytes + self._positions.nbytes + self._newest_at.nbytes

    @torch.inference_mode()
    def join(self, slot: int | Tensor) -> None:
        """Forgets what the slot, or each slot of an int tensor, held: another sequence begins there."""
        self._positions[slot] = -1
        self._newest_at[slot] = -1

    @torch.inference_mode()
    def append(self, slots: Tensor, positions: Tensor, features: Tensor) -> None:
        """Takes features [T, F] of accepted tokens at positions int [T] in slots int [T]; -1 for rows of padding.

        A slot's rows come in the order of their positions, at most `window` of a slot in one call. Waits for no device.
        """
        head = self._head
        slots, positions = slots.long(), positions.long()
        rows = head.context(features)
        at = positions % head.window
        self._kept[:, slots, at] = head.keys(rows, positions)
        self._positions[slots, at] = positions
        # Of several rows of a slot the last one counts, but writes to one place come in any order: a maximum does not.
        self._newest_at.scatter_reduce_(0, slots % len(self._newest_at), positions, "amax")
        is_newest = self._newest_at[slots] == positions
        self._newest[torch.where(is_newest, slots, -1)] = rows

    def read(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [L, n, W, 2, K, D], bool [n, W] of what positions int [n] see, and newest rows [n, H]."""
        slots, positions = slots.long(), positions.long()
        at = self._positions[slots]
        seen = (at >= 0) & (at < positions.unsqueeze(1)) & (at >= positions.unsqueeze(1) - self._head.window)
        fresh = (self._newest_at[slots] == positions - 1) & (positions > 0)
        return self._kept[:, slots], seen, self._newest[slots] * fresh.unsqueeze(1)


def read(path: Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Sizes and tensors of a head's file. Raises ModelError where it is no such file."""
    try:
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get(METADATA)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if written is None:
            raise ModelError(f"{path}: no draft head: its metadata lack {METADATA!r}.")
        config = msgspec.json.decode(written, type=HeadConfig)
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise ModelError(f"{path}: can't be read as a draft head: {error}") from error
    if config.format != FORMAT:
        raise ModelError(f"{path}: a draft head of format {config.format}; this version reads {FORMAT}.")
    return config, tensors


class _Product:
    def __init__(self, weight_VH: Tensor) -> None:
        self._weight_VH = weight_VH

    def __call__(self, x_NH: Tensor) -> Tensor:
        return F.linear(x_NH.to(self._weight_VH.dtype), self._weight_VH)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of [..., D] by cos and sin [..., D / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

"""Weights of 4 or 8 bits on a CPU, quantized as they are loaded. Knows nothing of models.

One or a few rows are multiplied by torch's packed products, which read a quarter or half of the bytes; more rows by
the same numbers in the model's dtype, which the processor's matrix units take faster: a second copy, which
`int4-only` and `int8-only` do without. So the number of rows changes speed and rounding, never the weights. Where tiles
of bytes run and pay, weights of 8 bits are multiplied by them alone, with rows rounded to 8 bits in groups.

int4: 16 levels between the least and the largest of GROUP weights of a row, a scale and an offset a group.
int8: 255 levels around zero, a scale a row; with int4 the head has it too, where 4 bits lose most of what they lose.
Dimensions: O rows out, I columns in, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.engine.formats import FP8, numbers_of
from flowinfer.engine.models import fp8
from flowinfer.engine.models.linear import Make, Projection, make_linear, make_tiles
from flowinfer.errors import ModelError
from flowinfer.kernels.int8_linear import Int8Weight, int8_linear, missing

GROUP = 32  # weights that share a scale: 5 bits a weight in all, and half the loss of 64
FEW_ROWS = {4: 5, 8: 2}  # rows up to which the packed product is the faster: one core of an AMD EPYC with AVX-512
_ROWS_OUT = 16  # the packed product of 4 bits wants multiples of it


class Quantization(NamedTuple):
    """bits: 4 or 8.  group: weights a scale, of 4 bits.  wide: whether a copy in the model's dtype is kept."""

    bits: int
    group: int = GROUP
    wide: bool = True


def parse(weights: str) -> Quantization | None:
    """What a `weights` setting means; None for the checkpoint's own. int4:64 has groups of 64, to compare with."""
    numbers = numbers_of(weights)
    if not numbers:
        return None
    bits, _, group = numbers.removeprefix("int").partition(":")
    return Quantization(int(bits), int(group or GROUP), wide=numbers == weights)


class Makers(NamedTuple):
    """What makes the products of a model: of its layers, and of its head."""

    layers: Make
    head: Make


def makers(
    weights: str, device: torch.device, wrap: Callable[[Make], Make] = lambda make: make, *, tiles: bool = False
) -> Makers | None:
    """Of quantized weights; None for the checkpoint's own. wrap: what else is done to each product.

    tiles: for a model that runs by compiled loops, in tiles.  Raises ModelError for integers on a GPU; where FP8 runs
    was asked before.
    """
    if weights == FP8:
        return Makers(fp8.make_fp8, wrap(make_linear))
    how = parse(weights)
    if how is None:
        return None
    refuse_device(device, weights)
    return Makers(wrap(quantizing(how, tiles=tiles)), wrap(quantizing(how._replace(bits=8), tiles=tiles)))


def quantizing(how: Quantization, *, tiles: bool = False) -> Make:
    """A stand-in for make_linear. A matrix that doesn't divide by groups and tiles stays as it is."""
    plain = make_tiles if tiles else make_linear

    def make(weight_OI: Tensor, bias_O: Tensor | None = None) -> Projection:
        if not fits(weight_OI, how):
            return plain(weight_OI, bias_O)
        if how.bits == 8 and tiles and not missing(weight_OI):
            return Int8Linear(weight_OI, bias_O)
        return QuantLinear(weight_OI, bias_O, how, plain)

    return make


def fits(weight_OI: Tensor, how: Quantization) -> bool:
    """Whether this matrix can be quantized so."""
    rows, columns = weight_OI.shape
    return how.bits == 8 or (rows % _ROWS_OUT == 0 and columns % how.group == 0)


def refuse_device(device: torch.device, weights: str) -> None:
    """Raises ModelError where packed products don't run."""
    if device.type != "cpu":
        raise ModelError(
            f"`weights: {weights}` is for CPUs: there is no kernel for it on {device}.",
            help="Leave `weights` out, or use `device: cpu`.",
        )


class QuantLinear:
    """The product of a quantized weight: packed up to `few` rows, wide above where there is a wide copy."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, how: Quantization, plain: Make = make_linear) -> None:
        quantized = Int4(weight_OI, how.group) if how.bits == 4 else Int8(weight_OI)
        packs = has_packed_products(how.bits)
        self.few = FEW_ROWS[how.bits] if how.wide else 1 << 30
        self._bias_O = bias_O
        self.wide = plain(quantized.plain(), bias_O) if how.wide or not packs else None
        self._packed = quantized.packed() if packs else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._packed is None or (self.wide is not None and x_TI.shape[0] > self.few):
            assert self.wide is not None, "one of the two is always there"
            return self.wide(x_TI)
        y_TO = self._packed(x_TI.contiguous())
        return y_TO if self._bias_O is None else y_TO + self._bias_O


class Int8Linear:
    """The product of a weight of 8 bits with rows of 8 bits (see kernels.int8_linear): any number of rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        quantized = Int8(weight_OI)
        self.weight = Int8Weight(quantized.codes, quantized.scale, bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return int8_linear(x_TI.contiguous(), self.weight)


class Int4:
    """codes int32 [O, I] of 0 to 15; a weight is (code - 8) * scale + offset, both [O, G] in the weight's dtype."""

    def __init__(self, weight_OI: Tensor, group: int) -> None:
        rows, columns = weight_OI.shape
        grouped = weight_OI.to(torch.float32, copy=True).view(rows, columns // group, group)  # worked on in place
        least, most = grouped.aminmax(dim=-1)
        self.scale = ((most - least) / 15).clamp_(min=1e-8).to(weight_OI.dtype)
        self.offset = (least + 8 * self.scale.float()).to(weight_OI.dtype)
        scale, offset = self.scale.float().unsqueeze(-1), self.offset.float().unsqueeze(-1)
        grouped.sub_(offset).div_(scale).add_(8).round_().clamp_(0, 15)
        self.codes = grouped.to(torch.int32).view(rows, columns)
        self.group, self.dtype = group, weight_OI.dtype

    def plain(self) -> Tensor:
        """[O, I]: the numbers that the codes stand for."""
        rows, columns = self.codes.shape
        values = self.codes.view(rows, -1, self.group).float().sub_(8).mul_(self.scale.float().unsqueeze(-1))
        return values.add_(self.offset.float().unsqueeze(-1)).view(rows, columns).to(self.dtype)

    def packed(self) -> Callable[[Tensor], Tensor]:
        """The product by torch's own layout of pairs."""
        codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(self.codes, 1)
        scales = torch.stack((self.scale, self.offset), -1).transpose(0, 1).contiguous()
        group = self.group

        def product(x_TI: Tensor) -> Tensor:
            y_TO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TI, codes, group, scales)
            return y_TO

        return product


class Int8:
    """codes int8 [O, I]; a weight is code * scale, scale [O] in the weight's dtype."""

    def __init__(self, weight_OI: Tensor) -> None:
        weight = weight_OI.to(torch.float32, copy=True)  # worked on in place: other copies leave holes in memory
        least, most = weight.aminmax(dim=1)
        self.scale = (torch.maximum(-least, most) / 127).clamp_(min=1e-8).to(weight_OI.dtype)
        weight.div_(self.scale.float().unsqueeze(1)).round_().clamp_(-127, 127)
        self.codes = weight.to(torch.int8)

    def plain(self) -> Tensor:
        """[O, I]: the numbers that the codes stand for."""
        return self.codes.float().mul_(self.scale.float().unsqueeze(1)).to(self.scale.dtype)

    def packed(self) -> Callable[[Tensor], Tensor]:
        """The product over the codes as they are."""
        codes, scale = self.codes, self.scale

        def product(x_TI: Tensor) -> Tensor:
            y_TO: Tensor = torch.ops.aten._weight_int8pack_mm(x_TI, codes, scale)
            return y_TO

        return product


def has_packed_products(bits: int) -> bool:
    """Whether this torch has them; without, the wide copy serves all rows."""
    name = "_weight_int4pack_mm_for_cpu" if bits == 4 else "_weight_int8pack_mm"
    return hasattr(torch.ops.aten, name)

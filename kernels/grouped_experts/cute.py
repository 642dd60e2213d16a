"""The two products of an expert layer for many rows, in the CuTe DSL of CUTLASS, for Hopper.

A persistent grid walks tiles of 128 rows by 256 columns. One warpgroup brings operands into a ring in shared memory,
two multiply (wgmma), each 64 rows of a tile. The first product picks its rows by token as it loads them (cp.async; the
copy engine can't gather on this card) and multiplies 128 gate columns and their 128 up columns in one tile, so that a
thread holds both numbers of silu(gate) * up and only half of the columns leave. The second one loads rows as they lie.
Rows of each expert start at a multiple of a block (`block_rows`), so that no tile has rows of two experts.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.utils import SmemAllocator, hopper_helpers

ROWS, COLUMNS, INNER = 128, 256, 64  # of a tile; 64 bf16 are the 128 bytes that the widest swizzle spans
HALF = COLUMNS // 2
LOADERS = 128  # threads of the warpgroup that loads
THREADS = LOADERS + 256
LOG2_E = 1.4426950408889634
SETTINGS = {True: {"cluster": 2, "stages": 4, "outs": 1}, False: {"cluster": 2, "stages": 4, "outs": 1}}  # by gated


class GroupedProduct:
    """out [M, N] = rows [M, K] @ weights [E, N or 2 N, K] of each row block's expert, bf16, sums in float32.

    gated: weights [E, 2 N, K], and out is silu(gate) * up. gather: rows come from x [T, K] by `tokens`.
    cluster: row blocks that share the loads of weights (1 or 2). stages: depth of the ring.
    """

    def __init__(
        self, size_in: int, size_out: int, num_experts: int, *, gated: bool, gather: bool, cluster: int, stages: int,
        outs: int, lag: int = 0,
    ) -> None:  # fmt: skip
        self.size_in, self.size_out, self.num_experts = size_in, size_out, num_experts
        self.gated, self.gather, self.cluster, self.stages, self.outs = gated, gather, cluster, stages, outs
        self.lag = lag
        self.columns = HALF if gated else COLUMNS  # that a tile writes
        self.passes = self.columns // HALF
        self.early = 4 if gated else 2  # steps of a tile in which the one before leaves
        self.leaving = {3: 0} if gated else {0: 0, 1: 1}  # after which of them 128 columns are ready
        self.num_column_tiles = size_out // self.columns
        self.k_tiles = size_in // INNER

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        weights: cute.Pointer,
        out: cute.Pointer,
        tokens: cute.Pointer,
        expert_of_block: cute.Pointer,
        num_blocks: cute.Pointer,
        num_rows_in: Int32,
        num_rows_out: Int32,
        num_programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """See launch for the arguments."""
        k, n = self.size_in, self.size_out
        all_columns = 2 * n if cutlass.const_expr(self.gated) else n
        x_MK = cute.make_tensor(x, cute.make_layout((num_rows_in, k), stride=(k, 1)))
        w_NKE = cute.make_tensor(
            weights, cute.make_layout((all_columns, k, self.num_experts), stride=(k, 1, all_columns * k))
        )
        out_MN = cute.make_tensor(out, cute.make_layout((num_rows_out, n), stride=(n, 1)))
        tokens_M = cute.make_tensor(tokens, cute.make_layout((num_rows_out,)))
        experts_B = cute.make_tensor(expert_of_block, cute.make_layout((num_rows_out // ROWS,)))
        blocks = cute.make_tensor(num_blocks, cute.make_layout((1,)))

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        a_layout = cute.tile_to_shape(atom, (ROWS, INNER, self.stages), order=(0, 1, 2))
        b_layout = cute.tile_to_shape(atom, (COLUMNS, INNER, self.stages), order=(0, 1, 2))
        half_layout = cute.tile_to_shape(atom, (HALF, INNER, 2 * self.stages), order=(0, 1, 2))
        c_layout = cute.tile_to_shape(atom, (ROWS // 2, HALF, 2 * self.outs), order=(0, 1, 2))

        load = cpasync.CopyBulkTensorTileG2SOp()
        load_b = cpasync.CopyBulkTensorTileG2SMulticastOp() if cutlass.const_expr(self.cluster > 1) else load
        a_atom, a_tma = cpasync.make_tiled_tma_atom(load, x_MK, cute.slice_(a_layout, (None, None, 0)), (ROWS, INNER))
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            load_b, w_NKE, cute.slice_(half_layout, (None, None, 0)), (HALF, INNER)
        )
        c_atom, c_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out_MN, cute.slice_(c_layout, (None, None, 0)), (ROWS // 2, HALF)
        )
        mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, COLUMNS)
        )
        zero_mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (2, 1, 1), (64, COLUMNS)
        )
        half_mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, HALF)
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(b_layout)], 1024]
            c: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(c_layout)], 1024]

        self.storage = Storage
        self.kernel(
            x_MK, tokens_M, experts_B, blocks, a_atom, a_tma, b_atom, b_tma, c_atom, c_tma, mma, zero_mma, half_mma,
            a_layout, b_layout, half_layout, c_layout,
        ).launch(
            grid=(num_programs, 1, 1), block=(THREADS, 1, 1), cluster=(self.cluster, 1, 1), min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x_MK: cute.Tensor,
        tokens_M: cute.Tensor,
        experts_B: cute.Tensor,
        blocks: cute.Tensor,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        c_atom: cute.CopyAtom,
        c_tma: cute.Tensor,
        mma: cute.TiledMma,
        zero_mma: cute.TiledMma,
        half_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        half_layout: cute.ComposedLayout,
        c_layout: cute.ComposedLayout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        num_programs, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        rank = program % self.cluster

        storage = SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        a_plain = storage.a.data_ptr()
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sHalf = storage.b.get_tensor(half_layout.outer, swizzle=half_layout.inner)
        sC = storage.c.get_tensor(c_layout.outer, swizzle=c_layout.inner)

        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + stage, 1 + LOADERS if self.gather else 1)
                    cute.arch.mbarrier_init(empty + stage, 8 * self.cluster)
            cute.arch.mbarrier_init_fence()
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(c_atom)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        gB = cute.local_tile(b_tma, (HALF, INNER), (None, None, None))
        tBs, tBg = cpasync.tma_partition(
            b_atom, 0, cute.make_layout(1), cute.group_modes(sHalf, 0, 2), cute.group_modes(gB, 0, 2)
        )
        gA = cute.local_tile(a_tma, (ROWS, INNER), (None, None))
        tAs, tAg = cpasync.tma_partition(
            a_atom, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        gC = cute.local_tile(c_tma, (ROWS // 2, HALF), (None, None))
        tCs, tCg = cpasync.tma_partition(
            c_atom, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
        )
        # Programs of a cluster take neighbouring blocks of rows at the same columns: of one expert but at its edge.
        num_tiles = (blocks[0] + (self.cluster - 1)) // self.cluster * self.num_column_tiles
        first, step = program // self.cluster, num_programs // self.cluster
        # Shared memory as bytes of the 128-byte swizzle: 16-byte piece p of row r lies at piece p ^ (r % 8).
        piece, row0 = thread % 8, (thread // 8) % 16

        if group == 0:
            cute.arch.setmaxregister_decrease(56)
            stage, phase, issued = Int32(0), Int32(1), Int32(0)
            copy_row = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128
            )
            to = a_plain.toint() + (row0 * INNER * 2 + (piece ^ (row0 % 8)) * 16)
            for tile in cutlass.range(first, num_tiles, step, unroll=1):
                block, column = tile // self.num_column_tiles, tile % self.num_column_tiles
                row_tile = block * self.cluster + rank
                expert = experts_B[row_tile]
                alike = expert == experts_B[row_tile ^ (self.cluster - 1)]
                n_first = column if cutlass.const_expr(self.gated) else 2 * column
                n_second = n_first + (self.size_out // HALF if cutlass.const_expr(self.gated) else 1)
                sources = []
                if cutlass.const_expr(self.gather):
                    for i in cutlass.range_constexpr(ROWS // 16):
                        token = tokens_M[row_tile * ROWS + row0 + 16 * i]
                        sources.append(x_MK.iterator.toint() + Int64(token) * (2 * self.size_in) + piece * 16)
                for k in cutlass.range(self.k_tiles, unroll=1):
                    if cutlass.const_expr(self.gather) or warp_index == 0:
                        cute.arch.mbarrier_wait(empty + stage, phase)
                    if warp_index == 0:
                        with cute.arch.elect_one():
                            num_rows = COLUMNS if cutlass.const_expr(self.gather) else COLUMNS + ROWS
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_rows * INNER * 2)
                        if cutlass.const_expr(self.cluster == 1):
                            for side in cutlass.range_constexpr(2):
                                cute.copy(
                                    b_atom, tBg[None, n_second if side else n_first, k, expert],
                                    tBs[None, 2 * stage + side], tma_bar_ptr=full + stage,
                                )  # fmt: skip
                        elif alike:  # half for both
                            cute.copy(
                                b_atom, tBg[None, n_first + rank * (n_second - n_first), k, expert],
                                tBs[None, 2 * stage + rank], tma_bar_ptr=full + stage, mcast_mask=cutlass.Int16(3),
                            )  # fmt: skip
                        else:
                            for side in cutlass.range_constexpr(2):
                                cute.copy(
                                    b_atom, tBg[None, n_second if side else n_first, k, expert],
                                    tBs[None, 2 * stage + side], tma_bar_ptr=full + stage,
                                    mcast_mask=cutlass.Int16(1 + rank),
                                )  # fmt: skip
                        if cutlass.const_expr(not self.gather):
                            cute.copy(a_atom, tAg[None, row_tile, k], tAs[None, stage], tma_bar_ptr=full + stage)
                    if cutlass.const_expr(self.gather):
                        for i in cutlass.range_constexpr(ROWS // 16):
                            source = cute.make_ptr(
                                BFloat16, sources[i] + k * (2 * INNER), cute.AddressSpace.gmem, assumed_align=16
                            )
                            place = cute.make_ptr(
                                BFloat16, to + (stage * (2 * ROWS * INNER) + i * (32 * INNER)),
                                cute.AddressSpace.smem, assumed_align=16,
                            )  # fmt: skip
                            cute.copy(
                                copy_row, cute.make_tensor(source, cute.make_layout((8,))),
                                cute.make_tensor(place, cute.make_layout((8,))),
                            )  # fmt: skip
                        if cutlass.const_expr(self.lag > 0):
                            cute.arch.cp_async_commit_group()
                            if issued >= self.lag:
                                cute.arch.cp_async_wait_group(self.lag)
                                cute.arch.fence_view_async_shared()
                                cute.arch.mbarrier_arrive(full + (stage + (self.stages - self.lag)) % self.stages)
                            issued += 1
                        else:
                            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                    stage += 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase ^= 1
            if cutlass.const_expr(self.gather and self.lag > 0) and issued > 0:
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_view_async_shared()
                for back in cutlass.range_constexpr(self.lag, 0, -1):
                    cute.arch.mbarrier_arrive(full + (stage + (self.stages - back)) % self.stages)
        else:
            cute.arch.setmaxregister_increase(224)
            worker = thread - LOADERS
            half = group - 1
            lane = thread % 32
            rows_of_group = mma.get_slice(half * 128)
            frag_a = mma.make_fragment_A(rows_of_group.partition_A(sA))
            frag_b = mma.make_fragment_B(rows_of_group.partition_B(sB))
            sums = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), Float32)
            flat = cute.make_tensor(sums.iterator, cute.make_layout((COLUMNS // 2,)))

            store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), half_mma)
            thread_store = store.get_slice(worker % 128)
            to_C = thread_store.partition_D(sC)
            result = cute.make_rmem_tensor(half_mma.partition_shape_C((ROWS // 2, HALF)), BFloat16)
            result_flat = cute.make_tensor(result.iterator, cute.make_layout((HALF // 2,)))
            from_result = store.retile(result)

            mma.set(warpgroup.Field.ACCUMULATE, True)
            zero_mma.set(warpgroup.Field.ACCUMULATE, False)
            # A tile leaves while the next one's first two steps multiply: its sums wait as pairs of bf16.
            kept = cute.make_rmem_tensor((COLUMNS // 4,), Int32)
            kept.fill(0)
            result_words = cute.recast_tensor(result_flat, Int32)
            stage, phase = Int32(0), Int32(0)
            row_before, column_before = Int32(0), Int32(0)
            for tile in cutlass.range(first, num_tiles, step, unroll=1):
                done = stage
                for k in cutlass.range_constexpr(self.early):
                    self.multiply(mma if k > 0 else zero_mma, mma, sums, frag_a, frag_b, full, stage, phase)
                    self.leave(k, kept, result_flat, result_words, store, from_result, to_C, half, warp_index)
                    if cutlass.const_expr(k in self.leaving):
                        part = self.leaving[k]
                        if warp_index % 4 == 0 and tile > first:
                            cute.copy(
                                c_atom, tCs[None, half * self.outs + part % self.outs],
                                tCg[None, 2 * row_before + half, column_before * self.passes + part],
                            )  # fmt: skip
                            cute.arch.cp_async_bulk_commit_group()
                    if cutlass.const_expr(k > 0):
                        warpgroup.wait_group(1)
                        self.release(empty, done, lane)
                    done = stage
                    stage += 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase ^= 1
                for _ in cutlass.range(self.early, self.k_tiles, unroll=1):
                    self.multiply(mma, mma, sums, frag_a, frag_b, full, stage, phase)
                    warpgroup.wait_group(1)
                    self.release(empty, done, lane)
                    done = stage
                    stage += 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase ^= 1
                warpgroup.wait_group(0)
                self.release(empty, done, lane)
                kept.store(flat.load().to(BFloat16).bitcast(Int32))
                row_before = tile // self.num_column_tiles * self.cluster + rank
                column_before = tile % self.num_column_tiles
            if first < num_tiles:
                for k in cutlass.range_constexpr(self.early):
                    self.leave(k, kept, result_flat, result_words, store, from_result, to_C, half, warp_index)
                    if cutlass.const_expr(k in self.leaving):
                        part = self.leaving[k]
                        if warp_index % 4 == 0:
                            cute.copy(
                                c_atom, tCs[None, half * self.outs + part % self.outs],
                                tCg[None, 2 * row_before + half, column_before * self.passes + part],
                            )  # fmt: skip
                            cute.arch.cp_async_bulk_commit_group()
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0)
        if cutlass.const_expr(self.cluster > 1):  # a peer may still write here
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def multiply(self, first_mma, mma, sums, frag_a, frag_b, full, stage, phase):
        """Starts the products of a step once its operands are there."""
        cute.arch.mbarrier_wait(full + stage, phase)
        if cutlass.const_expr(self.gather and self.lag == 0):
            cute.arch.fence_view_async_shared()
        warpgroup.fence()
        for inner in cutlass.range_constexpr(INNER // 16):
            cute.gemm(
                mma if cutlass.const_expr(inner > 0) else first_mma, sums,
                frag_a[None, None, inner, stage], frag_b[None, None, inner, stage], sums,
            )  # fmt: skip
        warpgroup.commit_group()

    @cute.jit
    def release(self, empty, stage, lane):
        """Says that this warp has read a stage, to all programs that write there."""
        if lane < self.cluster:
            cute.arch.mbarrier_arrive(empty + stage, lane if cutlass.const_expr(self.cluster > 1) else None)

    @cute.jit
    def leave(self, k, kept, result, result_words, store, from_result, to_C, half, warp_index):
        """What a thread does in step k for the tile before: results of some columns to shared memory, in the form in
        which the copy engine takes them. result: a thread's 64 numbers of 128 columns."""
        steps = self.early // self.passes  # for 128 columns
        part, share = k // steps, k % steps
        place = half * self.outs + part % self.outs
        if cutlass.const_expr(share == 0):
            if warp_index % 4 == 0:  # the copy that last read this place is through
                cute.arch.cp_async_bulk_wait_group(self.outs - 1, read=True)
            cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
        for i in cutlass.range_constexpr(share * (64 // steps), (share + 1) * (64 // steps), 4):
            if cutlass.const_expr(self.gated):
                gates = _two(kept[i // 2]) + _two(kept[i // 2 + 1])
                ups = _two(kept[32 + i // 2]) + _two(kept[32 + i // 2 + 1])
                sigmoids = _sigmoids(gates)
                for j in cutlass.range_constexpr(4):
                    result[i + j] = (gates[j] * sigmoids[j] * ups[j]).to(BFloat16)
            else:
                for j in cutlass.range_constexpr(2):
                    result_words[i // 2 + j] = kept[32 * part + i // 2 + j]
        for i in cutlass.range_constexpr(share * (8 // steps), (share + 1) * (8 // steps)):
            cute.copy(store, from_result[(None, i), 0, 0], to_C[(None, i), 0, 0, place])
        if cutlass.const_expr(share == steps - 1):
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)


@cute.jit
def _two(word):
    """The float32 of a pair of bf16 in one word."""
    return [(word << 16).bitcast(Float32), (word & -65536).bitcast(Float32)]


@cute.jit
def _sigmoids(gates):
    """1 / (1 + exp(-g)) of four numbers by one reciprocal, as the unit for those and for exp is what the gate waits on.

    exp(-g) is cut off at 2^30: the product of four stays finite, and g / 2^30 is nothing in bf16.
    """
    a, b, c, d = [1.0 + cute.math.exp2(cute.arch.fmin(g * -LOG2_E, 30.0), fastmath=True) for g in gates]
    ab, cd = a * b, c * d
    inverse = cute.arch.rcp_approx(ab * cd)
    of_ab, of_cd = inverse * cd, inverse * ab
    return of_ab * b, of_ab * a, of_cd * d, of_cd * c


def compile_product(size_in: int, size_out: int, num_experts: int, gated: bool) -> object:
    """One of the two products for these sizes; needs no card."""
    product = GroupedProduct(size_in, size_out, num_experts, gated=gated, gather=gated, **SETTINGS[gated])
    numbers = (Int32(1), Int32(1), Int32(1), cuda.CUstream(0))
    return cute.compile(product, *_pointers((16,) * 6), *numbers)


def launcher(compiled):
    """The compiled product as a function of addresses, sizes and a stream."""

    def launch(addresses, sizes, stream):
        compiled(*_pointers(addresses), *sizes, cuda.CUstream(stream))

    return launch


def _pointers(addresses):
    kinds = (BFloat16, BFloat16, BFloat16, Int32, Int32, Int32)
    return [
        make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16 if kind is BFloat16 else 4)
        for kind, address in zip(kinds, addresses, strict=True)
    ]

"""The Triton twin of the exact apply gives the bits of the torch code.

No GPU is needed: Triton's interpreter runs it in a process of its own, and Triton's compiler compiles it for one.
"""

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exact import bits, make_update, random_weight

from openrlhf_logra.math import exact
from openrlhf_logra.math.exact import ROUNDINGS, Update, apply_block, apply_flat, max_quantum
from openrlhf_logra.math.projection import Projection

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


class OnGpu(torch.Tensor):
    """A CPU tensor that `apply_block` takes for one on a GPU, and Triton's interpreter for what it is."""

    is_cuda = property(lambda self: True)


@dataclass(frozen=True)
class Case:
    """One update of W [d, k], and where its holder keeps W and how it applies the update."""

    d: int
    k: int
    r: int
    seed: int = 0
    rounding: str = "stochastic"
    steps: tuple[int, int] = (1, 1)  # W is every steps[0]-th row and steps[1]-th column of something larger,
    transposed: bool = False  # or of its transpose
    values: tuple[float, ...] = ()  # what W consists of, instead of random numbers
    factors: str = ""  # "largest": |q| and |D|, at extreme scales; "halves": D is +-1, at half the spacing of [1, 2)
    blocks: tuple[tuple[int, int, int, int], ...] = ()  # first and last row, first and last column; () is all of W
    cuts: tuple[int, ...] = ()  # or flat: ends of shards

    def update(self) -> Update:
        update = make_update(self.d, self.k, self.r, self.seed, rounding=self.rounding)
        if self.factors == "largest":
            key = reference.key_of("projection", self.seed, 1, "w")
            signs = torch.tensor([reference.column(key, self.r, j) for j in range(self.d)])  # so D_jj = Q r
            s = torch.tensor([2.0**-126, 0.0, 2.0**-20, 2.0**60]).repeat(self.d)[: self.d]
            update = replace(update, q=(signs * max_quantum(self.r)).to(torch.int16), s=s)
        elif self.factors == "halves":
            q = torch.where(update.q < 0, -1, 1).to(torch.int16)
            update = replace(update, q=q, s=torch.full_like(update.s, 2.0**-8))
        return update

    def storage(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All that the holder keeps there, and the view of W in it."""
        shape = [5 + size * step for size, step in zip((self.d, self.k), self.steps)]
        storage = random_weight(*(reversed(shape) if self.transposed else shape), self.seed)
        rows, cols = (slice(3, 3 + size * step, step) for size, step in zip((self.d, self.k), self.steps))
        view = (storage.T if self.transposed else storage)[rows, cols]
        if self.values:
            values = torch.tensor(self.values, dtype=torch.bfloat16).repeat(view.numel())
            view.copy_(values[: view.numel()].view_as(view))
        return storage, view

    def run(self, kind: type = torch.Tensor) -> torch.Tensor:
        """The storage's bits after the update of W, which `apply_block` takes for a tensor of `kind`."""
        update, (storage, view) = self.update(), self.storage()
        if self.cuts:
            flat, ends = view.flatten().clone(), sorted({*self.cuts, view.numel()})
            for start, end in zip([0, *ends], ends):
                apply_flat(flat[start:end].as_subclass(kind), update, start)
            view.copy_(flat.view_as(view))
        else:
            for row0, row1, col0, col1 in self.blocks or ((0, self.d, 0, self.k),):
                apply_block(view[row0:row1, col0:col1].as_subclass(kind), update, row0, col0)
        return bits(storage)


@dataclass(frozen=True)
class Corner:
    """The last rows and columns of a large matrix, of which nothing else is stored."""

    d: int
    k: int

    def run(self, kind: type = torch.Tensor) -> torch.Tensor:
        block = random_weight(6, 20)
        apply_block(block.as_subclass(kind), make_update(self.d, self.k, 1), self.d - 6, self.k - 20)
        return bits(block)


def start_interpreter():
    """Makes this process one where Triton interprets, and where the torch code of `apply_block` cannot run."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"  # read as kernels are defined
    from openrlhf_logra.kernels import apply as twin

    twin._check(torch.device("cpu"))  # its own comparison with the torch code, while there is some
    exact._product = exact._write = Projection.block = None
    torch.set_num_threads(1)


def check_of_another_device() -> str:
    """What the twin's own check says where the torch code disagrees."""
    from openrlhf_logra.kernels import apply as twin

    twin.apply_tiles = lambda weight, *_: weight.zero_()
    torch.cuda.get_device_name = lambda device: "Some GPU"
    try:
        twin._check(torch.device("cpu", 0))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def run_twin(case):
    return case.run(OnGpu).numpy()


@pytest.fixture(scope="module")
def twin():
    """The bits of a case by way of the Triton twin."""
    with ProcessPoolExecutor(1, get_context("spawn"), start_interpreter) as pool:
        yield lambda case: torch.from_numpy(pool.submit(run_twin, case).result())


def cases(most: int):
    return st.builds(
        Case,
        d=st.integers(1, most),
        k=st.integers(1, most),
        r=st.integers(1, 512),
        seed=st.integers(0, 10**6),
        rounding=st.sampled_from(ROUNDINGS),
        steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        transposed=st.booleans(),
    )


def pieces(data, length: int) -> list[tuple[int, int]]:
    ends = sorted({0, length, data.draw(st.integers(0, length))})
    return list(zip(ends, ends[1:]))


@needs_triton
@settings(max_examples=12, deadline=None)
@given(data=st.data(), case=cases(300))
def test_any_block_equals_torch(twin, data, case):
    """And nothing else of the storage changes."""
    rows, cols = data.draw(st.sampled_from(pieces(data, case.d))), data.draw(st.sampled_from(pieces(data, case.k)))
    case = replace(case, blocks=((*rows, *cols),))
    assert torch.equal(twin(case), case.run())


@needs_triton
@settings(max_examples=6, deadline=None)
@given(data=st.data(), case=cases(300))
def test_any_partition_equals_the_whole(twin, data, case):
    blocks = tuple((*rows, *cols) for rows in pieces(data, case.d) for cols in pieces(data, case.k))
    assert torch.equal(twin(replace(case, blocks=blocks)), case.run())


@needs_triton
@settings(max_examples=6, deadline=None)
@given(data=st.data(), case=cases(150))
def test_any_shards_equal_the_whole(twin, data, case):
    cuts = data.draw(st.lists(st.integers(1, case.d * case.k), min_size=1, max_size=2))
    assert torch.equal(twin(replace(case, cuts=tuple(cuts))), case.run())


@needs_triton
@settings(max_examples=8, deadline=None)
@given(d=st.integers(1, 8), k=st.integers(1, 160), r=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_equals_the_numpy_reference(twin, d, k, r, seed):
    case = Case(d, k, r, seed)
    update, (storage, view) = case.update(), case.storage()
    signs = reference.rademacher(reference.key_of("projection", seed, 1, "w"), r, k)
    dither_key = reference.key_of("dither", seed, 3, "w")
    expected = reference.apply(view.float().numpy(), update.q.numpy(), update.s.numpy(), signs, dither_key)
    view.copy_(torch.from_numpy(expected))
    assert torch.equal(twin(case), bits(storage))


@needs_triton
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rank", [1, 512, 700])
def test_extreme_factors_and_weights(twin, rank, rounding):
    weights = (0.0, -0.0, 2.0**-133, -(2.0**-126), 3.3e38, float("-inf"), 1.0)
    case = Case(8, 140, rank, rounding=rounding, values=weights, factors="largest")
    assert torch.equal(twin(case), case.run())


@needs_triton
def test_half_goes_to_even(twin):
    case = Case(4, 12, 1, rounding="nearest", values=(1.0, 1 + 2.0**-7, 1.5), factors="halves")
    assert torch.equal(twin(case), case.run())


@needs_triton
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nan_stays_nan(twin, rounding):
    """Which of its bit patterns it has is the machine's choice."""
    case = Case(2, 9, 3, rounding=rounding, values=(float("nan"), 1.0))
    of_twin, of_torch = (result.view(torch.bfloat16) for result in (twin(case), case.run()))
    assert torch.isnan(of_torch).sum() == 9
    torch.testing.assert_close(of_twin, of_torch, rtol=0, atol=0, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("k", [2**16, 2**16 + 5])
def test_indices_of_more_than_32_bits(twin, k):
    """Rows before and after element 2**35, where the dither's second counter word begins to count."""
    corner = Corner(2**35 // k + 3, k)
    assert torch.equal(twin(corner), corner.run())


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from openrlhf_logra.kernels.apply import _apply

constants = {"col_stride": 1, "STOCHASTIC": True, "WHOLE_GROUPS": True}
types = {"weight": "*bf16", "q": "*i16", "s": "*fp32", "projection_key": "u64", "dither_key": "u64"}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in _apply.arg_names}
aligned = ("weight", "row_stride", "q", "s", "col0", "cols", "rank")
attributes = {(_apply.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
source = ASTSource(_apply, signature, constants, attributes)
kernel = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8, "enable_fp_fusion": False})
assert kernel.asm["cubin"]
print(kernel.asm["ptx"])
"""


@needs_triton
def test_compiles_for_a_hopper_gpu(tmp_path):
    """To tensor core products of float16, and loads and stores of W that are 16 bytes wide."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    ptx = subprocess.run([sys.executable, "-c", COMPILE], env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert b"wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16" in ptx
    assert b"ld.global.v4.b32" in ptx and b"st.global.v4.b32" in ptx


def test_gaussian_updates_have_no_twin():
    weight = random_weight(20, 30)
    update = Update(Projection(0, 0, "w", 4, 30, "gaussian"), 0, torch.full((20, 4), 1e-3), None)
    expected = weight.clone()
    apply_block(expected, update)
    apply_block(weight.as_subclass(OnGpu), update)
    assert torch.equal(bits(weight), bits(expected))


def test_a_cpu_does_not_import_the_kernels():
    """All that needs them in these tests is in other processes."""
    Case(3, 4, 2).run()
    assert "openrlhf_logra.kernels" not in sys.modules


@needs_triton
def test_a_kernel_that_is_wrong_on_some_device_stops_the_run():
    with ProcessPoolExecutor(1, get_context("spawn"), start_interpreter) as pool:
        assert "does not give the right bits on Some GPU" in pool.submit(check_of_another_device).result()

"""Which block of which runtime parameter every checkpoint matrix fills, learnt from the model's own loader.

The loader is given matrices whose elements are their own flat indices and writes them into scratch parameters; what
arrives where is the layout. Fused qkv and gate_up, replicated KV heads, tensor-parallel slices and padded vocabularies
need no table of architectures.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..math.digest import as_matrix, matrix_shape

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Block:
    """Rows [row0, row0 + rows) of a runtime parameter (all its columns) hold rows [hf_row0, ...) and columns
    [hf_col0, ...) of a checkpoint matrix. A vector counts as one column; leading dimensions are joined into rows."""

    parameter: str
    row0: int
    rows: int
    cols: int
    hf_row0: int
    hf_col0: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """(row, rows, column, columns) within the checkpoint matrix."""
        return self.hf_row0, self.rows, self.hf_col0, self.cols

    def view(self, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """The block as a two-dimensional view of the runtime parameter's storage."""
        return as_matrix(parameters[self.parameter])[self.row0 : self.row0 + self.rows]


def discover_layout(
    model: nn.Module, shapes: Shapes, load_weights: LoadWeights
) -> tuple[dict[str, list[Block]], dict[str, str]]:
    """Learn the layout of a loaded model; its weights are left as they are, at the same addresses.

    Args:
        model: the runtime model.
        shapes: name and full shape of every checkpoint tensor.
        load_weights: the model's loader.

    Returns:
        Blocks by checkpoint name, and, for the names whose place could not be learnt, the reason.
    """
    layout: dict[str, list[Block]] = {}
    unknown: dict[str, str] = {}
    parameters = dict(model.named_parameters())
    learnt: dict[object, dict[str, list[Block]]] = {}
    # Layer by layer, so that scratch and index tensors are the size of one layer and not of the model.
    groups = _split(shapes, _layer)
    while groups:
        group = groups.pop(0)
        layer = _layer(next(iter(group)))
        # Layers alike are learnt once: a minute for a large model instead of an hour. Digests at first contact tell
        # whether each really is.
        kind = frozenset((_with_layer(name, "*"), tuple(shape)) for name, shape in group.items())
        if copied := _copy(learnt.get(kind, {}), layer, parameters):
            layout.update(copied)
            continue
        try:
            found = _discover_group(model, layer, group, load_weights)
        except Exception as error:  # a loader that cannot take a part of the checkpoint, or writes to another layer
            parts = _split(group, _module)
            if len(parts) > 1:  # names that it does not know must not take others with them
                groups[:0] = parts
                continue
            unknown.update(dict.fromkeys(group, f"the loader failed: {type(error).__name__}: {error}"))
            continue
        layout.update(found)
        if layer is not None and len(found) == len(group):
            learnt[kind] = found
        unknown.update({name: "not found in whole rows of a bf16 parameter" for name in group if name not in found})
    return layout, unknown


def _split(shapes: Shapes, key: Callable[[str], str | None]) -> list[Shapes]:
    """The names in groups of one key each, in order."""
    groups: dict[str | None, Shapes] = {}
    for name, shape in shapes.items():
        groups.setdefault(key(name), {})[name] = shape
    return list(groups.values())


def _module(name: str) -> str:
    """What is in front of the outermost number, or of the last dot where there is none."""
    layer = _layer(name)
    return name.rpartition(".")[0] if layer is None else name.split(f".{layer}.")[0]


def _layer(name: str) -> str | None:
    """The outermost number in a dotted name: checkpoint and runtime names differ, layer numbers do not."""
    return next((part for part in name.split(".") if part.isdigit()), None)


def _with_layer(name: str, layer: str) -> str:
    """The name with another outermost number."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return name if place is None else ".".join([*parts[:place], layer, *parts[place + 1 :]])


def _copy(
    learnt: dict[str, list[Block]], layer: str | None, parameters: dict[str, torch.Tensor]
) -> dict[str, list[Block]]:
    """The layout of another layer of the same kind; empty where the runtime's layers are not alike."""
    copied: dict[str, list[Block]] = {}
    for name, blocks in learnt.items():
        for block in blocks:
            ours, theirs = parameters[block.parameter], parameters.get(other := _with_layer(block.parameter, layer))
            if (
                theirs is None
                or theirs.shape != ours.shape
                or theirs.dtype != ours.dtype
                or not theirs.is_contiguous()
            ):
                return {}
            copied.setdefault(_with_layer(name, layer), []).append(replace(block, parameter=other))
    return copied


def _discover_group(
    model: nn.Module, layer: str | None, shapes: Shapes, load_weights: LoadWeights
) -> dict[str, list[Block]]:
    offsets, total = {}, 1  # 0 is what loaders write into padding
    for name, shape in shapes.items():
        offsets[name] = total
        total += torch.Size(shape).numel()
    with _scratch_parameters(model, layer) as scratch:
        load_weights(
            (
                name,
                torch.arange(start, start + torch.Size(shapes[name]).numel(), dtype=torch.float64).view(shapes[name]),
            )
            for name, start in offsets.items()
        )
        found: dict[str, list[Block]] = {}
        irregular: set[str] = set()
        for runtime_name, tensor in scratch.items():
            blocks, unclear = _blocks_of(runtime_name, tensor, shapes, offsets)
            irregular |= unclear
            for name, block in blocks:
                found.setdefault(name, []).append(block)
    return {name: blocks for name, blocks in found.items() if name not in irregular}


@contextmanager
def _scratch_parameters(model: nn.Module, layer: str | None) -> Iterator[dict[str, torch.Tensor]]:
    """For a while every parameter of this layer holds float64 scratch, every other one nothing at all."""
    parameters = [(name, parameter, parameter.data) for name, parameter in model.named_parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    scratch = {}
    try:
        for name, parameter, original in parameters:
            if _layer(name) == layer:
                parameter.data = torch.full(parameter.shape, -1.0, dtype=torch.float64)
                if original.dtype is torch.bfloat16 and original.is_contiguous():
                    scratch[name] = parameter.data
            else:
                parameter.data = torch.empty(0, dtype=original.dtype)
        yield scratch
    finally:
        for _, parameter, original in parameters:
            parameter.data = original
        for buffer, original in buffers:
            buffer.copy_(original)


def _blocks_of(
    runtime_name: str, scratch: torch.Tensor, shapes: Shapes, offsets: dict[str, int]
) -> tuple[list[tuple[str, Block]], set[str]]:
    """Runs of rows in one runtime parameter, and the names that sit in it in any other arrangement."""
    names = list(shapes)
    bounds = torch.tensor([offsets[name] for name in names], dtype=torch.int64)
    index = as_matrix(scratch).to(torch.int64)
    rows, cols = index.shape
    regular = (index == index[:, :1] + torch.arange(cols)).all(1) & (index[:, 0] > 0)
    odd = index[~regular]
    odd = odd[odd > 0]
    unclear = {names[i] for i in (torch.searchsorted(bounds, odd, right=True) - 1).unique().tolist()}
    first = index[:, 0].contiguous()
    owner = torch.searchsorted(bounds, first, right=True) - 1
    widths = torch.tensor([matrix_shape(shapes[name])[1] for name in names], dtype=torch.int64)
    safe = owner.clamp(min=0)
    flat = first - bounds[safe]
    hf_row, hf_col = flat // widths[safe], flat % widths[safe]
    blocks, row = [], 0
    same = (owner[1:] == owner[:-1]) & (hf_col[1:] == hf_col[:-1]) & (hf_row[1:] == hf_row[:-1] + 1)
    same &= regular[1:] & regular[:-1]
    for end in [*(torch.nonzero(~same).flatten() + 1).tolist(), rows]:
        if regular[row]:
            name = names[int(owner[row])]
            hf_rows, hf_cols = matrix_shape(shapes[name])
            if int(hf_col[row]) + cols <= hf_cols and int(hf_row[row]) + end - row <= hf_rows:
                blocks.append((name, Block(runtime_name, row, end - row, cols, int(hf_row[row]), int(hf_col[row]))))
            else:
                unclear.add(name)
        row = end
    return blocks, unclear

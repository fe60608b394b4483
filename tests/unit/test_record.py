"""The wire format: every record comes back as it was, and no damaged or contradictory one is ever applied."""

import hashlib
import json
import pickle
import random
import sys
import tracemalloc
import zlib
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from openrlhf_logra.math.exact import Update, apply_block, max_quantum, quantize
from openrlhf_logra.math.projection import Projection, projection_index
from openrlhf_logra.sync.record import (
    FORMAT,
    Record,
    RecordError,
    decode,
    dense_record,
    encode,
    factor_record,
    sparse_record,
    write_change,
)
from openrlhf_logra.sync.sparse import Elements, changed_elements, compress, decompress, join

SHAPES = {"a.weight": (6, 10), "b.weight": (4, 7), "norm.weight": (9,), "experts": (2, 3, 5)}
RANK, UPDATE, REFRESH = 3, 7, 2


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


def any_bits(shape, seed=0):
    """A bf16 tensor of random bits: NaNs with payloads, infinities, -0 and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)


def random_elements(size, density, seed=0):
    """Roughly `density` of `size` elements, and their new bits."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.nonzero(torch.rand(size, generator=generator) < density).flatten()
    return Elements(indices, bits(any_bits((len(indices),), seed + 1)))


def random_update(name, rows, width, rank=RANK, index=UPDATE, seed=0, rounding="stochastic"):
    coefficients = torch.randn(rows, rank, generator=torch.Generator().manual_seed(seed)) * 1e-2
    coefficients[0] = 0
    return Update(Projection(42, index // REFRESH, name, rank, width), index, *quantize(coefficients), rounding)


def factors():
    return factor_record(
        tuple(random_update(name, *SHAPES[name]) for name in ("a.weight", "b.weight")), UPDATE + 1, REFRESH
    )


def factors_and_more():
    """A factor record that also carries a densely trained parameter by its elements, and another one whole."""
    extra = {"norm.weight": random_elements(9, 0.5), "experts": any_bits(SHAPES["experts"])}
    return Record(factors().header, {**factors().tensors, **sparse_record(extra, UPDATE, UPDATE + 1).tensors})


def sparse():
    changes = {"a.weight": random_elements(60, 0.3), "experts": any_bits(SHAPES["experts"])}
    return sparse_record({**changes, "norm.weight": random_elements(9, 0.0)}, 3, 9)


def sparse_empty():
    return sparse_record({}, 3, 4)


def dense():
    return dense_record({name: any_bits(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}, 5)


def verified():
    """With everything that a record's header may hold."""
    header = replace(factors().header, run='run of "2026" \\ ü', parent="f" * 32)
    return Record(header.with_digests(dict.fromkeys(SHAPES, 2**64 - 1)), factors().tensors)


RECORDS = [factors, factors_and_more, sparse, sparse_empty, dense, verified]
of_every_kind = pytest.mark.parametrize("make", RECORDS)


def seal(metadata, tensors):
    """A blob with any header at all and the checksum that docs/bits.md and the module describe."""
    blob = save(tensors, metadata={**metadata, "checksum": "0" * 32})
    place = blob.index(b'"checksum":"') + len(b'"checksum":"')
    return blob[:place] + hashlib.blake2b(blob, digest_size=16).hexdigest().encode() + blob[place + 32 :]


def metadata_of(record):
    return {key: str(value) for key, value in asdict(record.header).items()}


def assert_same_change(one, other):
    assert type(one) is type(other)
    if isinstance(one, Update):
        assert torch.equal(one.q, other.q) and torch.equal(one.s, other.s)
        assert replace(one, q=None, s=None) == replace(other, q=None, s=None)
    elif isinstance(one, Elements):
        assert torch.equal(one.indices, other.indices) and torch.equal(one.bits, other.bits)
    else:
        assert torch.equal(bits(one), bits(other))


def assert_refused(record, shapes=SHAPES, match=None):
    """Refused by whoever wants its changes, over the wire too; nothing else is raised."""
    for one in (record, decode(encode(record)[0])):
        with pytest.raises(RecordError, match=match):
            list(one.changes(shapes))


# ---- there and back


@of_every_kind
def test_what_is_encoded_comes_back(make):
    record = make()
    blob, checksum = encode(record)
    back = decode(blob)
    assert back.header == replace(record.header, checksum=checksum)
    assert set(back.names()) == set(record.names()) and back.sizes() == record.sizes()
    before, after = dict(record.changes(SHAPES)), dict(back.changes(SHAPES))
    assert set(before) == set(after) == set(record.names())
    for name in before:
        assert_same_change(before[name], after[name])
    assert sum(record.sizes().values()) == sum(t.numel() * t.element_size() for t in record.tensors.values())


def test_a_factor_record_returns_the_updates_it_was_made_of():
    given_updates = [random_update(name, *SHAPES[name], rounding="nearest") for name in ("a.weight", "b.weight")]
    record = decode(encode(factor_record(tuple(given_updates), UPDATE + 1, REFRESH))[0])
    back = dict(record.changes(SHAPES))
    for update in given_updates:
        assert_same_change(update, back[update.projection.name])
    assert projection_index(UPDATE, REFRESH) == UPDATE // REFRESH != UPDATE  # and not the default


def test_digests_come_back():
    values = {"a.weight": 2**64 - 1, "b.weight": 3, "norm.weight": 0}
    header = decode(encode(Record(sparse().header.with_digests(values), sparse().tensors))[0]).header
    assert {name: int(value, 16) for name, value in json.loads(header.digests).items()} == values
    assert int(header.digest, 16) == 2


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    width=st.integers(1, 40),
    rank=st.integers(1, 20),
    index=st.integers(0, 10**6),
    refresh=st.integers(0, 50),
    seed=st.integers(0, 2**63 - 1),
    by_columns=st.booleans(),
)
def test_any_factors_come_back(rows, width, rank, index, refresh, seed, by_columns):
    q = torch.randint(-max_quantum(rank), max_quantum(rank) + 1, (rows, rank), dtype=torch.int16)
    s = torch.ldexp(torch.ones(rows), torch.randint(-126, 100, (rows,))) * (torch.rand(rows) < 0.8)
    if by_columns:  # the memory order of an optimizer's choice is none of the receiver's business
        q = q.t().contiguous().t()
    update = Update(Projection(seed, projection_index(index, refresh), "w", rank, width), index, q, s)
    record = decode(encode(factor_record((update,), index + 1, refresh))[0])
    ((name, back),) = record.changes({"w": (rows, width)})
    assert name == "w"
    assert_same_change(update, back)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    density=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_tensors_of_any_shape_come_back_whole_or_by_elements(shape, density, seed):
    whole, size = any_bits(shape, seed), torch.Size(shape).numel()
    elements = random_elements(size, density, seed)
    for record, change in (
        (dense_record({"w": whole}, 3), whole),
        (sparse_record({"w": whole}, 2, 3), whole),
        (sparse_record({"w": elements}, 2, 3), elements),
    ):
        ((_, back),) = decode(encode(record)[0]).changes({"w": shape})
        assert_same_change(change, back)


AWKWARD = [
    "model.layers.10.self_attn.q_proj.weight",
    'with "quotes" and \\ backslash',
    '"checksum":"' + "1" * 32,
    "checksum",
    "größe.重み.🙂",
    "new\nline\ttab\0nul",
    " ",
    "q",
    ".q",
    "w.q",
    "w.s",
    "w.gaps",
    "w.bits",
    "w.q.q",
    "x.bits.bits",
    "x.gaps",
    "x",
    "format",
    "{}",
    "' or 1=1",
]


def test_awkward_names_come_back_from_a_dense_record():
    """In a dense record a key is a name, whatever it ends in: `w.q` and `w.s` are two parameters."""
    held = {name: any_bits((3, 5), seed) for seed, name in enumerate(AWKWARD)}
    record = decode(encode(dense_record(held, 1))[0])
    back = dict(record.changes(dict.fromkeys(held, (3, 5))))
    assert set(back) == set(held) == set(record.sizes())
    for name, tensor in held.items():
        assert_same_change(tensor, back[name])


@pytest.mark.parametrize("name", AWKWARD)
def test_one_awkward_name_comes_back_in_every_form(name):
    update, elements, whole = random_update(name, 4, 5), random_elements(20, 0.4), any_bits((4, 5))
    for record, change in (
        (factor_record((update,), UPDATE + 1, REFRESH), update),
        (sparse_record({name: elements}, 1, 2), elements),
        (sparse_record({name: whole}, 1, 2), whole),
        (dense_record({name: whole}, 2), whole),
    ):
        record = decode(encode(record)[0])
        assert record.names() == [name]
        ((found, back),) = record.changes({name: (4, 5)})
        assert found == name
        assert_same_change(change, back)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=12), st.integers(0, 9), min_size=1, max_size=5))
@example({"": 0})
def test_any_names_come_back_from_a_dense_record(seeds):
    seeds.pop("__metadata__", None)  # safetensors' own
    held = {name: any_bits((2,), seed) for name, seed in seeds.items()}
    blob, checksum = encode(dense_record(held, 1))
    record = decode(blob)
    assert record.header.checksum == checksum and set(record.tensors) == set(held)


@pytest.mark.parametrize("first, second", [("w.q", "w.s"), ("w.gaps", "w.bits")])
def test_two_whole_parameters_that_look_like_halves_are_not_misread(first, second):
    """Only a dense record can hold both whole: elsewhere they are refused, not taken for a change of `w`."""
    shapes = {"w": (4, 5), first: (4, 5), second: (4, 5)}
    record = sparse_record({name: any_bits((4, 5)) for name in (first, second)}, 1, 2)
    assert_refused(record, shapes)
    shapes.pop("w")
    assert_refused(record, shapes)


def without(record, names):
    """What the one piece without some parameters holds."""
    pieces = list(record.pieces(names, sys.maxsize))
    assert len(pieces) <= 1
    return pieces[0] if pieces else Record(record.header, {})


@of_every_kind
def test_pieces_are_records_that_add_up(make):
    record, sizes = make(), make().sizes()
    for limit in (1, 200, 2000, sys.maxsize):
        pieces = [decode(encode(piece)[0]) for piece in record.pieces(set(), limit)]
        assert sorted(name for piece in pieces for name in piece.names()) == sorted(record.names())
        assert {key for piece in pieces for key in piece.tensors} == set(record.tensors)
        assert all(len(piece.names()) <= 1 or sum(piece.sizes().values()) <= limit for piece in pieces)
        assert limit < sum(sizes.values()) or len(pieces) == 1


@of_every_kind
def test_what_is_left_out_is_gone_and_the_rest_is_untouched(make):
    record = make()
    for name in record.names():
        rest = decode(encode(without(record, {name}))[0])
        assert set(rest.names()) == set(record.names()) - {name} and name not in rest.sizes()
        assert set(rest.tensors) < set(record.tensors)
        assert rest.header == replace(record.header, checksum=rest.header.checksum)
    assert not without(record, set(record.names())).tensors
    assert set(without(record, {"no such name"}).tensors) == set(record.tensors)


# ---- damage


@of_every_kind
def test_any_changed_byte_is_refused(make):
    """Every position: the length field, the header and its padding, the checksum itself, every tensor."""
    blob, _ = encode(make())
    assert len(decode(blob).tensors) == len(make().tensors)
    generator = random.Random(make.__name__)
    for position, value in enumerate(blob):
        for other in {value ^ 1, value ^ 0x20, generator.randrange(256), 0, 0x20} - {value}:
            with pytest.raises(RecordError):
                decode(blob[:position] + bytes([other]) + blob[position + 1 :])


@of_every_kind
def test_any_truncation_and_any_appendix_is_refused(make):
    blob, _ = encode(make())
    for length in range(len(blob)):
        with pytest.raises(RecordError):
            decode(blob[:length])
        with pytest.raises(RecordError):
            decode(blob[length + 1 :])
    for more in (b"\0", b" ", blob):
        with pytest.raises(RecordError):
            decode(blob + more)


@of_every_kind
def test_runs_of_damaged_bytes_are_refused(make):
    blob, _ = encode(make())
    generator = random.Random(make.__name__)
    for _ in range(300):
        start = generator.randrange(len(blob))
        length = generator.randint(1, 40)
        for damage in (generator.randbytes(length), b"\0" * length, blob[:length]):
            damaged = (blob[:start] + damage + blob[start + length :])[: len(blob)]
            if damaged != blob:
                with pytest.raises(RecordError):
                    decode(damaged)


def test_two_tensors_swapped_are_refused():
    """The same bytes under each other's names."""
    record = dense_record({"a": any_bits((4, 4), 1), "b": any_bits((4, 4), 2)}, 1)
    blob, _ = encode(record)
    swapped = blob.replace(b'"a":{', b'"?":{').replace(b'"b":{', b'"a":{').replace(b'"?":{', b'"b":{')
    assert torch.equal(bits(load(swapped)["b"]), bits(record.tensors["a"]))  # still valid safetensors
    with pytest.raises(RecordError, match="checksum"):
        decode(swapped)


def header_only(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 64,
        pickle.dumps({"format": FORMAT}),
        json.dumps({"__metadata__": {"format": FORMAT}}).encode(),
        save({}),
        save({"w": torch.zeros(2)}),
        save({}, metadata={"format": FORMAT}),
        header_only(b"{}"),
        header_only(b"[]"),
        header_only(b"null"),
        header_only(b'{"__metadata__":null}'),
        header_only(b'{"__metadata__":{}}'),
        header_only(b'{"__metadata__":{"format":1}}'),
        header_only(b'{"__metadata__":{"format":"' + FORMAT.encode() + b'"},"__metadata__":null}'),
        header_only(b'{"w":{"dtype":"BF16","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'),
        header_only(b"[" * 5000),
    ],
    ids=lambda blob: repr(blob[:24]),
)
def test_what_is_no_record_is_called_so(blob):
    with pytest.raises(RecordError):
        decode(blob)


@pytest.mark.parametrize("name", ["logra/2", "logra", "", "LOGRA/1"])
def test_another_format_is_named(name):
    with pytest.raises(RecordError, match=f"format '{name}'.*reads '{FORMAT}'"):
        decode(seal({**metadata_of(sparse()), "format": name}, sparse().tensors))


@pytest.mark.parametrize("key", sorted(set(asdict(sparse_record({}, 0, 1).header)) - {"checksum"}))
def test_a_header_must_be_complete(key):
    metadata = metadata_of(sparse())
    assert decode(seal(metadata, sparse().tensors)).header.version == 9  # the seal is not what is refused
    del metadata[key]
    with pytest.raises(RecordError):
        decode(seal(metadata, sparse().tensors))


@pytest.mark.parametrize("key", ["version", "base_version", "update", "seed", "rank", "refresh_every"])
@pytest.mark.parametrize("value", ["", "one", "1.0", "0x1", "nan", "1e3", "None", "9" * 5000])
def test_numbers_in_a_header_are_integers(key, value):
    with pytest.raises(RecordError):
        decode(seal({**metadata_of(factors()), key: value}, factors().tensors))


# ---- sealed well, and wrong: what a faulty sender could make


CONTRADICTIONS = [
    (factors, {"kind": "factors"}),
    (factors, {"kind": ""}),
    (factors, {"kind": "sparse"}),
    (factors, {"kind": "dense", "version": UPDATE, "base_version": UPDATE}),
    (factors, {"version": UPDATE}),
    (factors, {"version": UPDATE + 2}),
    (factors, {"version": UPDATE - 1}),
    (factors, {"base_version": UPDATE - 1}),
    (factors, {"update": UPDATE + 1}),
    (factors, {"update": UPDATE - 1}),
    (factors, {"rank": 0}),
    (factors, {"rank": -RANK}),
    (factors, {"rank": RANK + 1}),
    (factors, {"distribution": ""}),
    (factors, {"distribution": "gaussian"}),
    (factors, {"rounding": ""}),
    (factors, {"rounding": "up"}),
    (factors, {"refresh_every": -1}),
    (factors, {"version": -1, "base_version": -2, "update": -2}),
    (sparse, {"version": 2}),
    (sparse, {"base_version": 10}),
    (sparse, {"base_version": -1}),
    (sparse, {"kind": "dense"}),
    (dense, {"version": 6}),
    (dense, {"base_version": 6}),
    (dense, {"version": -1, "base_version": -1}),
    (dense, {"kind": "factor"}),
]


@pytest.mark.parametrize("make, wrong", CONTRADICTIONS, ids=lambda value: str(getattr(value, "__name__", value)))
def test_a_header_that_contradicts_itself_is_refused(make, wrong):
    record = make()
    list(record.changes(SHAPES))
    assert_refused(Record(replace(record.header, **wrong), record.tensors))


@pytest.mark.parametrize("kind", ["factor", "dense"])
def test_a_record_without_changes_is_refused(kind):
    """A sparse one is not: an optimizer's step may be too small for any bit."""
    record = {"factor": factors, "dense": dense}[kind]()
    assert_refused(Record(record.header, {}), match="holds no change")
    assert list(sparse_empty().changes(SHAPES)) == []


def factors_with(**tensors):
    record = factors()
    changed = {f"a.weight.{half}": tensor for half, tensor in tensors.items()}
    return Record(record.header, {**record.tensors, **changed})


def scales(value, row=2):
    s = factors().tensors["a.weight.s"].clone()
    s[row] = value
    return s


Q = factors().tensors["a.weight.q"]
WRONG_FACTORS = {
    "a row too few": {"q": Q[:-1], "s": scales(1.0)[:-1]},
    "a row too many": {"q": torch.cat([Q, Q[:1]]), "s": torch.cat([scales(1.0), scales(1.0)[:1]])},
    "q and s of different lengths": {"s": scales(1.0)[:-1]},
    "another rank": {"q": Q[:, :-1].contiguous()},
    "a transposed q": {"q": Q.t().contiguous()},
    "a flat q": {"q": Q.flatten()},
    "a q of three dimensions": {"q": Q[:, :, None]},
    "an empty q": {"q": Q[:0]},
    "s as a column": {"s": scales(1.0)[:, None]},
    "s as a number": {"s": torch.tensor(1.0)},
    "q in int32": {"q": Q.int()},
    "q in float32": {"q": Q.float()},
    "q in uint16": {"q": Q.view(torch.uint16)},
    "q in bf16": {"q": Q.view(torch.bfloat16)},
    "s in float64": {"s": scales(1.0).double()},
    "s in bf16": {"s": scales(1.0).bfloat16()},
    "s in int32": {"s": scales(1.0).view(torch.int32)},
    "a negative scale": {"s": scales(-1.0)},
    "a scale of NaN": {"s": scales(float("nan"))},
    "a scale of infinity": {"s": scales(float("inf"))},
    "a negative infinite scale": {"s": scales(float("-inf"))},
    # Not exact: the product of scale and integer would round, and a kernel that fuses it would not.
    "a scale that is no power of two": {"s": scales(0.75)},
    "a scale one bit off a power of two": {"s": (scales(1.0).view(torch.int32) | 1).view(torch.float32)},
}


@pytest.mark.parametrize("wrong", WRONG_FACTORS.values(), ids=WRONG_FACTORS)
def test_factors_that_do_not_fit_are_refused(wrong):
    list(factors_with(s=scales(0.25)).changes(SHAPES))
    assert_refused(factors_with(**wrong), match="a.weight")


@pytest.mark.parametrize("rank", [1, 3, 512, 513, 1024])
def test_coefficients_beyond_the_exact_range_are_refused(rank):
    """Above Q the integer product leaves the 24 bits in which it is exact in any order of summation."""
    quantum = max_quantum(rank)

    def record(value):
        q = torch.zeros(4, rank, dtype=torch.int16)
        q[1, 0] = value
        update = Update(Projection(0, 0, "w", rank, 5), 0, q, torch.ones(4))
        return factor_record((update,), 1, 1)

    for value in (quantum, -quantum):
        list(record(value).changes({"w": (4, 5)}))
    for value in {quantum + 1, -quantum - 1, -(2**15)} - {2**15}:
        assert_refused(record(value), {"w": (4, 5)})


def test_factors_of_what_is_no_matrix_are_refused():
    for shape in ((6,), (6, 10, 1), (1, 6, 10), ()):
        assert_refused(factors(), {**SHAPES, "a.weight": shape}, match="a.weight")


@of_every_kind
def test_an_unknown_parameter_is_named(make):
    record = make()
    for name in record.names():
        assert_refused(record, {n: s for n, s in SHAPES.items() if n != name}, match=f"unknown parameter {name}")


@of_every_kind
def test_a_missing_half_is_refused(make):
    record = make()
    for key in record.tensors:
        if key in SHAPES:
            continue
        left = Record(record.header, {k: tensor for k, tensor in record.tensors.items() if k != key})
        assert_refused(left)


def test_halves_of_two_forms_make_no_whole():
    """q without s beside complete elements of the same parameter, and so on."""
    record = factors_and_more()
    more = {f"a.weight.{key}": t for key, t in compress(random_elements(60, 0.3)).items()}
    for lost in ("q", "s", "gaps", "bits"):
        tensors = {**record.tensors, **more}
        tensors.pop(f"a.weight.{lost}")
        assert_refused(Record(record.header, tensors))
        assert_refused(Record(record.header, dict(reversed(tensors.items()))))


def test_one_parameter_in_two_forms_is_refused():
    """Which of the two would be meant?"""
    record = factors_and_more()
    elements = {f"a.weight.{key}": t for key, t in compress(random_elements(60, 0.3)).items()}
    whole = {"a.weight": any_bits(SHAPES["a.weight"])}
    for more in (elements, whole, {**elements, **whole}):
        assert_refused(Record(record.header, {**record.tensors, **more}), match="a.weight")
    rest = without(record, {"a.weight"})
    assert_refused(Record(rest.header, {**rest.tensors, **elements, **whole}), match="a.weight")


@pytest.mark.parametrize("make", [sparse, dense, factors_and_more])
def test_a_whole_tensor_of_another_shape_or_dtype_is_refused(make):
    record = make()
    right = record.tensors["experts"]
    wrong = [right[:-1], right.flatten(), right.permute(2, 1, 0).contiguous(), right[None], right[..., None]]
    wrong += [right.float(), right.half(), right.view(torch.int16), right.view(torch.uint8)]
    for tensor in wrong:
        assert_refused(Record(record.header, {**record.tensors, "experts": tensor}), match="experts")


# ---- changed elements


def equal(one, other):
    return torch.equal(one.indices, other.indices) and torch.equal(one.bits, other.bits)


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(st.integers(1, 300), st.integers(1, 100_000)),
    density=st.one_of(st.sampled_from([0.0, 1e-4, 0.01, 0.5, 1.0]), st.floats(0, 1)),
    seed=st.integers(0, 10**6),
    ends=st.sets(st.sampled_from([0, -1])),
)
def test_changed_elements_survive_the_wire(size, density, seed, ends):
    """Any share of the elements, none and all of them, with and without the first and the last one."""
    old = any_bits((size,), seed)
    changed = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density
    changed[list(ends)] = True
    new = torch.where(changed, any_bits((size,), seed + 1), old)
    elements = changed_elements(old, new)
    assert torch.equal(elements.indices, torch.nonzero(bits(old) != bits(new)).flatten())
    data = compress(elements)
    assert all(tensor.dtype is torch.uint8 for tensor in data.values())
    back = decompress(**data, size=size)
    assert back.indices.dtype is torch.int64 and back.bits.dtype is torch.int16 and equal(back, elements)
    held = old.clone()
    back.write(held[:, None], 0, 0, 1)
    assert torch.equal(bits(held), bits(new))


def test_every_bit_pattern_survives():
    """-0, infinities and the payloads of NaNs are values like others, and differ from each other."""
    new = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for old in (0, -(2**15), 0x7F80, 0x7FC0, -1):
        before = torch.full((2**16,), old, dtype=torch.int16)
        elements = changed_elements(before.view(torch.bfloat16), new.view(torch.bfloat16))
        assert len(elements.indices) == 2**16 - 1
        held = before.view(torch.bfloat16).view(256, 256).clone()
        decompress(**compress(elements), size=2**16).write(held, 0, 0, 256)
        assert torch.equal(bits(held).flatten(), new)


def test_unchanged_nans_are_unchanged():
    same = torch.tensor([float("nan"), 0.0, -0.0, float("inf")]).bfloat16()
    assert len(changed_elements(same, same.clone()).indices) == 0


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 400),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    density=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_ranges_of_a_tensor_join(size, cuts, density, seed):
    """As ranks that hold one partition each find them; some partitions are empty."""
    old = any_bits((size,), seed)
    new = torch.where(torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density, -old, old)
    bounds = sorted({0, size, *(min(cut, size) for cut in cuts)})
    parts = [changed_elements(old[a:b], new[a:b], a) for a, b in zip(bounds, bounds[1:])]
    parts.append(changed_elements(old[:0], new[:0], size))
    assert equal(join(parts), changed_elements(old, new))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 30),
    width=st.integers(1, 30),
    density=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    form=st.sampled_from(["elements", "whole", "update"]),
    data=st.data(),
)
def test_a_block_takes_its_slice_of_the_whole(rows, width, density, form, data):
    """Any rows and columns, in storage of any strides; beside the block nothing changes."""
    old = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
    if form == "update":
        change, new = random_update("w", rows, width), old.clone()
        apply_block(new, change)
    else:
        new = torch.where(torch.rand(rows, width) < density, any_bits((rows, width)), old)
        change = new if form == "whole" else changed_elements(old.flatten(), new.flatten())
    row0 = data.draw(st.integers(0, rows - 1), "row0")
    col0 = data.draw(st.integers(0, width - 1), "col0")
    n = data.draw(st.integers(0, rows - row0), "n")
    m = data.draw(st.integers(1, width - col0), "m")
    step = data.draw(st.integers(1, 2), "step")
    storage = torch.full((n + 2, step * m + 2), 7.0).bfloat16()
    block = storage[1 : 1 + n, 1 : 1 + step * m : step]
    block.copy_(old[row0 : row0 + n, col0 : col0 + m])
    expected = storage.clone()
    expected[1 : 1 + n, 1 : 1 + step * m : step] = new[row0 : row0 + n, col0 : col0 + m]
    address = block.data_ptr()
    write_change(change, block, row0, col0, width)
    assert torch.equal(bits(storage), bits(expected)) and block.data_ptr() == address


def deflated(values, dtype):
    planes = np.array(values, dtype).view(np.uint8).reshape(-1, np.dtype(dtype).itemsize).T
    return torch.frombuffer(bytearray(zlib.compress(np.ascontiguousarray(planes).tobytes())), dtype=torch.uint8)


GAPS = {
    "no increase": [1, 0, 2],
    "no increase at the end": [1, 2, 0],
    "beyond the end": [1, 99],
    "at the end": [1, 9],
    "the first beyond the end": [10, 1],
    "a wrapped negative": [5, 2**32 - 1],
    "the largest": [2**32 - 1, 2**32 - 1],
    "more of them than elements": [0] + [1] * 10,
}


@pytest.mark.parametrize("gaps", GAPS.values(), ids=GAPS)
def test_damaged_gaps_are_refused(gaps):
    values = deflated(range(len(gaps)), "<u2")
    assert decompress(deflated([0, 1, 8], "<u4"), deflated(range(3), "<u2"), 10).indices.tolist() == [0, 1, 9]
    with pytest.raises(ValueError):
        decompress(deflated(gaps, "<u4"), values, 10)
    record = Record(sparse().header, {"w.gaps": deflated(gaps, "<u4"), "w.bits": values})
    assert_refused(record, {"w": (10,)}, match="w")


@pytest.mark.parametrize("indices, values", [(3, 2), (2, 3), (0, 1), (1, 0)])
def test_unequal_counts_are_refused(indices, values):
    gaps = deflated([1] * indices, "<u4")
    with pytest.raises(ValueError, match=f"{indices} indices and {values} values"):
        decompress(gaps, deflated(range(values), "<u2"), 10)


def test_data_that_is_not_deflated_planes_is_refused():
    good = compress(random_elements(100, 0.3))
    other_levels = {half: tensor.numpy().tobytes() for half, tensor in good.items()}
    for half, data in other_levels.items():
        wrong = [b"", b"\0", data[:-1], data + b"\0", data + data, data[1:], zlib.decompress(data)]
        wrong += [zlib.compress(zlib.decompress(data) + b"\0"), zlib.compress(zlib.decompress(data)[:-1])]
        for bad in wrong:
            tensor = torch.frombuffer(bytearray(bad), dtype=torch.uint8) if bad else torch.zeros(0, dtype=torch.uint8)
            with pytest.raises(ValueError):
                decompress(**{**good, half: tensor}, size=100)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.bfloat16, torch.float32, torch.bool])
def test_data_of_another_dtype_is_refused(dtype):
    good = compress(random_elements(100, 0.3))
    for half in good:
        with pytest.raises(ValueError):
            decompress(**{**good, half: good[half].to(dtype)}, size=100)


def test_any_damage_of_the_data_is_refused_or_harmless():
    """Zlib's own checksum is the inner one; what passes it must still be the same elements."""
    elements = random_elements(500, 0.2)
    good = compress(elements)
    generator = random.Random(0)
    for half, data in good.items():
        for _ in range(400):
            bad = data.clone()
            bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
            try:
                back = decompress(**{**good, half: bad}, size=500)
            except ValueError:
                continue
            assert equal(back, elements)  # a bit that zlib does not read (its level, for one)


@pytest.mark.parametrize("half", ["gaps", "bits"])
def test_a_bomb_is_refused_without_its_memory(half):
    """Less than a hundred kilobytes that say that they are 64 megabytes."""
    deflater, part = zlib.compressobj(9), b"\0" * (1 << 20)
    bomb = b"".join(deflater.compress(part) for _ in range(64)) + deflater.flush()
    data = {**compress(random_elements(100, 0.3)), half: torch.frombuffer(bytearray(bomb), dtype=torch.uint8)}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            decompress(**data, size=1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_gaps_of_four_billion_are_not_wrapped():
    """The wire has 32 bits per gap: a tensor of more elements is either right or refused, never wrapped."""
    for indices in ([2**32 - 1], [5, 5 + 2**32 - 1]):
        elements = Elements(torch.tensor(indices), torch.zeros(len(indices), dtype=torch.int16))
        assert equal(decompress(**compress(elements), size=2**34), elements)
    for indices in ([2**32], [5, 5 + 2**32], [5, 2**33 + 7]):
        with pytest.raises(ValueError, match="gap"):
            compress(Elements(torch.tensor(indices), torch.zeros(len(indices), dtype=torch.int16)))


def test_one_percent_of_a_matrix_is_a_small_message(record_property):
    """About two bytes of bits and one of gap per changed element."""
    size = 1 << 20
    old = torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.01
    nudged = (bits(old) + changed.to(torch.int16)).view(torch.bfloat16)
    record = sparse_record({"w": changed_elements(old, nudged)}, 0, 1)
    per_element = record.sizes()["w"] / int(changed.sum())
    ratio = 2 * size / record.sizes()["w"]
    record_property("bytes per changed element", round(per_element, 2))
    record_property("times smaller than dense", round(ratio, 1))
    print(f"1% changed: {per_element:.2f} bytes per changed element, {ratio:.1f} times smaller than dense")
    assert per_element < 3.5 and ratio > 50


@pytest.mark.parametrize(
    "updates, refresh_every, says",
    [
        (lambda: (), 1, "no updates lead to version"),
        (lambda: (random_update("a", 3, 5), random_update("b", 3, 5, index=UPDATE - 1)), 2, "different steps or runs"),
        (
            lambda: (random_update("a", 3, 5), random_update("b", 3, 5, rounding="nearest")),
            2,
            "different steps or runs",
        ),
        (lambda: (random_update("a", 3, 5), random_update("b", 3, 5, rank=RANK + 1)), 2, "different steps or runs"),
        (lambda: (random_update("a", 3, 5),), 20, "refresh_every"),
        (lambda: (replace(random_update("a", 3, 5), s=None),), 2, "exact_updates"),
    ],
)
def test_updates_that_no_reader_could_repeat_make_no_record(updates, refresh_every, says):
    """Also what a caller forgot: K, or that a step was skipped."""
    with pytest.raises(ValueError, match=says):
        factor_record(updates(), UPDATE + 1, refresh_every)

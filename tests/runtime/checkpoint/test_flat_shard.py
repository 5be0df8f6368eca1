"""Parts of tensors that are no boxes: cut, written, read into other parts."""

import json
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tasks.runtime.checkpoint.flat_shard import FlatShard, chunks, local_values, register_flat_shard, shard_of
from tasks.runtime.checkpoint.storage import INDEX, Index, part_key, write_tensors
from tasks.runtime.checkpoint.writer import _files, _index

SHAPES = [(), (1,), (7,), (1, 5), (4, 3), (3, 1, 4), (2, 3, 4), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_are_the_elements_in_their_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for begin, end in combinations_with_replacement(range(whole.numel() + 1), 2):
        found = chunks(shape, begin, end)
        slices = [tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True)) for offset, size in found]
        assert [value for box in slices for value in whole[box].flatten().tolist()] == list(range(begin, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def cut(tensor, ends):
    """The shards of a tensor that end at these elements, in memory of their own."""
    flat = tensor.flatten()
    return [FlatShard(tensor.shape, begin, flat[begin:end].clone()) for begin, end in pairwise([0, *ends, len(flat)])]


def save(folder, shards):
    """As processes of a job that each have one of them."""
    folder.mkdir()
    planners = [DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False) for _ in shards]
    for rank, (planner, shard) in enumerate(zip(planners, shards, strict=True)):
        planner.set_up_planner({"w": shard}, is_coordinator=rank == 0)
    plans, _ = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    for rank, (planner, plan) in enumerate(zip(planners, plans, strict=True)):
        files = {}
        for item, file in _files(planner.finish_plan(plan), rank):
            files.setdefault(file, {})[part_key(item.index)] = planner.resolve_data(item)
        for file, tensors in files.items():
            write_tensors(folder / file, tensors)
    (folder / INDEX).write_text(json.dumps(_index(plans)))
    return Index(folder)


@pytest.mark.parametrize(
    ("shape", "written", "wanted"),
    [((5, 4), [6, 7], [10]), ((5, 4), [0, 9], [1, 2, 19]), ((7,), [3], [5]), ((2, 3, 4), [5, 17], [11])],
    ids=str,
)
def test_what_some_processes_write_others_read(tmp_path, shape, written, wanted):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    index = save(tmp_path / "saved", cut(whole, written))
    for expected, empty in zip(cut(whole, wanted), cut(torch.zeros(shape), wanted), strict=True):
        index.read({"w": empty})
        assert torch.equal(empty.flat, expected.flat)
    everything = torch.zeros(shape)
    index.read({"w": everything})
    assert torch.equal(everything, whole)


def test_a_parameter_says_where_its_values_are():
    parameter = torch.nn.Parameter(torch.zeros(0))
    assert shard_of(parameter).shape == (0,) and not shard_of(parameter).requires_grad
    shard = FlatShard(torch.Size((2, 3)), 4, torch.tensor([4.0, 5.0]))
    register_flat_shard(parameter, lambda: shard)
    assert shard_of(parameter) is shard and shard.shape == (2, 3)
    assert local_values(parameter).tolist() == [4.0, 5.0]
    with pytest.raises(TypeError, match="on other ranks"):
        torch.neg(shard)

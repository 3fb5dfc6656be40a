"""Compiled once, whatever comes and goes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.errors import NotResident
from tests.parts.served import Net, ids, net, split_net

pytestmark = pytest.mark.torch


class Frames:
    """A compiler that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture
def pair(tmp_path, load):
    """The whole net, and the same as parts."""
    torch.compiler.reset()
    whole = net()
    split_net(tmp_path, whole)
    with torch.no_grad():
        yield whole, load(tmp_path, build=Net)


def test_compiled_in_place_it_takes_tasks(pair):
    """model.compile(fullgraph=True): one graph for each task, none anew over five rounds of loads and evictions."""
    whole, model = pair
    frames = Frames()
    model.compile(backend=frames, fullgraph=True)
    for _ in range(5):
        for task in ("classify", "tag", "score"):
            assert torch.equal(model(ids(), task=task), whole(ids(), task))
            assert model.pagein.unload(task)
    assert frames.count == 3


def test_compiled_beside_it_runs_under_leases(pair):
    """torch.compile(model, fullgraph=True) under a lease: one graph, none anew over five rounds."""
    whole, model = pair
    frames = Frames()
    compiled = torch.compile(model.classify, backend=frames, fullgraph=True)
    for _ in range(5):
        with model.lease("classify"):
            assert torch.equal(compiled(torch.ones(3, 16)), whole.classify(torch.ones(3, 16)))
        assert model.pagein.unload("classify")
    assert frames.count == 1


def test_compiled_code_finds_no_cold_weight(pair):
    """A compiled head outside a lease raises and names the tensor: it computes from nothing that is away."""
    _, model = pair
    compiled = torch.compile(model.classify, backend=Frames(), fullgraph=True)
    with model.lease("classify"):
        compiled(torch.ones(3, 16))
    model.pagein.unload("classify")
    with pytest.raises(Exception, match=r"classify\.") as told:
        compiled(torch.ones(3, 16))
    chain = [told.value, told.value.__cause__, told.value.__context__]
    assert any(isinstance(one, NotResident) or "NotResident" in str(one) for one in chain)

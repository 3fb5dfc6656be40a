"""The store under any order of operations, against a naive model of what lies in it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagein.kv.snapshots.answers import Fetched, Kept, Match, Skipped
from tests.kv.snapshots.build import Clock, bytes_on_disk, drafts, fingerprint, offer, open_store, payload_of

CAP = 30_000
RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 80)), min_size=1, max_size=4)
MODELS = st.sampled_from([fingerprint(), fingerprint(weights="b" * 64), fingerprint(tenant="u" * 64)])
TALKS = st.sampled_from([None, "a", "b"])


def common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


class StoreMachine(RuleBasedStateMachine):
    """Puts, asks, reads, removals, pins and restarts; `held` is what the answers so far say lies in the store."""

    def __init__(self):
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="kv-")
        self.root = Path(self._folder.name) / "kv"
        self.clock = Clock()
        self.store = open_store(self.root, self.clock, cap=CAP)
        self.held = {}
        self.pinned = set()

    def teardown(self):
        self._folder.cleanup()

    @rule(
        model=MODELS, runs=RUNS, talk=TALKS, size=st.integers(1, 12_000), whole=st.booleans(), idle=st.integers(0, 99)
    )
    def put(self, model, runs, talk, size, whole, idle):
        self.clock.now += idle
        tokens = [symbol for symbol, count in runs for _ in range(count)]
        asked = offer(tokens, size, fingerprint=model, conversation=talk, whole_only=whole)
        can = self.store.can_put(asked)
        done = self.store.put(asked, payload_of(tokens, size))
        assert type(can) is (Skipped if isinstance(done, Skipped) else type(None))
        if isinstance(done, Kept):
            for entry in done.left:
                extended = entry.header.conversation == talk and self.held[entry.id][1] == tokens[: entry.header.tokens]
                assert entry.id not in self.pinned or extended
                if entry.id in self.pinned:
                    self.pinned = (self.pinned - {entry.id}) | {done.snapshot.id}
                del self.held[entry.id]
            self.held[done.snapshot.id] = (model, tokens, size, whole)

    @rule(model=MODELS, runs=RUNS)
    def ask(self, model, runs):
        prompt = [symbol for symbol, count in runs for _ in range(count)]
        usable = [
            common(prompt, tokens)
            for other, tokens, _, whole in self.held.values()
            if other == model and (not whole or common(prompt, tokens) == len(tokens) < len(prompt))
        ]
        found = self.store.longest_match(model, prompt)
        best = max(usable, default=0)
        if best == 0:
            assert not isinstance(found, Match)
            return
        assert found.common_tokens == best
        other, tokens, size, _ = self.held[found.snapshot.id]
        assert other == model
        assert common(prompt, tokens) == best
        target = self.root.parent / "slot.bin"
        assert isinstance(self.store.fetch(found.snapshot, target), Fetched)
        assert target.read_bytes() == b"".join(payload_of(tokens, size))

    @rule(data=st.data())
    def pin(self, data):
        if self.held and not self.pinned:
            one = data.draw(st.sampled_from(sorted(self.held)))
            assert self.store.pin(one)
            self.pinned.add(one)

    @rule()
    def unpin(self):
        for one in self.pinned:
            self.store.unpin(one)
        self.pinned.clear()

    @rule(data=st.data())
    def remove(self, data):
        if self.held:
            one = data.draw(st.sampled_from(sorted(self.held)))
            assert [entry.id for entry in self.store.remove([one])] == [one]
            del self.held[one]
            self.pinned.discard(one)

    @rule()
    def restart(self):
        self.store = open_store(self.root, self.clock, cap=CAP)
        self.pinned.clear()

    @rule()
    def gc(self):
        assert self.store.gc() == []

    @invariant()
    def the_account_is_exact(self):
        assert {entry.id for entry in self.store.entries()} == set(self.held)
        assert self.store.usage().bytes == bytes_on_disk(self.root) <= CAP
        assert self.store.usage().reserved == 0
        assert drafts(self.root) == []


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

"""The store under any order of operations, against a naive model of what lies in it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagein.kv.disk import Kept, Kind, Policy
from pagein.kv.snapshots.answers import Miss
from tests.kv.disk.build import Clock, check_account, check_found, content, open_store, payload, text

CAP = 3 * 1024**2
LENGTHS = (90_000, 8192)
GROUPS = {"full": Policy.every(), "sliding": Policy.sliding(70), "side": Policy.exact()}
ASKED = st.sampled_from(
    [["full"], ["full", "sliding"], ["full", "side"], ["full", "sliding", "side"], ["sliding"], ["side"]]
)
RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90)), min_size=1, max_size=4)
TENANTS = st.sampled_from(["", "t"])
TALKS = st.sampled_from(["a", "b", "c"])


def symbols(runs):
    return tuple(symbol for symbol, count in runs for _ in range(count))


def common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def along(tokens, said):
    """Whether a block that ends so lies on the way of a text: a partial one only at its end."""
    return tokens == said[: len(tokens)] and (len(tokens) % 64 == 0 or len(tokens) == len(said))


class StoreMachine(RuleBasedStateMachine):
    """`held` is what the answers so far say lies in the store: by tenant, tokens up to a block's end, and group."""

    def __init__(self):
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="kv-")
        self.root = Path(self._folder.name) / "kv"
        self.clock = Clock()
        self.store = open_store(self.root, self.clock, cap=CAP)
        self.held = set()
        self.ended = {}
        self.pinned = None

    def teardown(self):
        self.store.close()
        self._folder.cleanup()

    def there(self, tenant, tokens, group):
        prefix = text(tokens, tenant=tenant)
        return (len(prefix.links) - 1, group) not in self.store.missing(prefix, {group: GROUPS[group]})

    def settle(self, may_leave):
        """Take what left out of the model; it may only be what may leave."""
        gone = {one for one in self.held if not self.there(*one)}
        assert gone <= may_leave, gone - may_leave
        self.held -= gone

    def pinned_blocks(self):
        """What the pinned conversation's last turn goes along."""
        if self.pinned is None or self.pinned not in self.ended:
            return set()
        tokens = self.ended[self.pinned][-1]
        return {one for one in self.held if one[0] == self.pinned[0] and along(one[1], tokens) and one[2] == "full"}

    @rule(tenant=TENANTS, runs=RUNS, asked=ASKED, talk=TALKS, note=st.booleans(), idle=st.integers(0, 99))
    def turn(self, tenant, runs, asked, talk, note, idle):
        self.clock.now += idle
        tokens, prefix = symbols(runs), text(symbols(runs), tenant=tenant)
        groups = {group: GROUPS[group] for group in asked}
        refused = set()
        for index, group in self.store.missing(prefix, groups):
            end = tokens[: 64 * (index + 1)]
            done = self.store.put(prefix, index, group, groups[group], payload(prefix, index, group, LENGTHS))
            if isinstance(done, Kept):
                self.held.add((tenant, end, group))
                stays = self.pinned_blocks() | {(tenant, end, group)}
                before = set(self.held)
                self.settle(self.held - stays if done.left else set())
                assert len(before - self.held) == done.left
            else:
                assert "no room" in done.reason
                refused.add((index, group))
        assert refused >= set(self.store.missing(prefix, groups))
        if note:
            self.store.note_turn(talk, prefix)
            self.ended.setdefault((tenant, talk), []).append(tokens)
            mine = {one for one in self.held if self.on_path(one, [(tenant, talk)])}
            new = {one for one in self.held if one[0] == tenant and along(one[1], tokens)}
            replaced = {one for one in mine if one not in new or one[2] != "full"}
            others = {one for one in self.held if self.on_last_path(one, (tenant, talk)) and one[2] == "full"}
            self.settle(replaced - others)

    def on_path(self, one, holders):
        tenant, tokens, _ = one
        return any(tenant == who[0] and along(tokens, said) for who in holders for said in self.ended.get(who, ()))

    def on_last_path(self, one, but):
        tenant, tokens, _ = one
        return any(tenant == who[0] and along(tokens, said[-1]) for who, said in self.ended.items() if who != but)

    @rule(tenant=TENANTS, runs=RUNS, asked=ASKED)
    def ask(self, tenant, runs, asked):
        tokens, prefix = symbols(runs), text(symbols(runs), tenant=tenant)
        groups = {group: GROUPS[group] for group in asked}
        best = next((end for end in range(len(tokens), 0, -1) if self.serves(tenant, tokens[:end], groups)), 0)
        found = self.store.walk(prefix, groups)
        if best == 0:
            assert isinstance(found, Miss)
            return
        assert found.length == best
        for refs in found.refs.values():
            for ref in refs:
                assert ref.first + ref.rows <= best
        check_found(self.store, prefix, found, LENGTHS)

    def serves(self, tenant, tokens, groups):
        for group, policy in groups.items():
            if policy.kind is Kind.EXACT:
                if (tenant, tokens, group) not in self.held:
                    return False
                continue
            for begin in range(policy.first_token(len(tokens)) // 64 * 64, len(tokens), 64):
                end = tokens[: begin + 64]
                if not any(
                    one[0] == tenant
                    and one[2] == group
                    and begin < len(one[1]) <= begin + 64
                    and common(one[1], end) == len(end)
                    for one in self.held
                ):
                    return False
        return True

    @rule(data=st.data())
    def read(self, data):
        if self.held:
            tenant, tokens, group = data.draw(st.sampled_from(sorted(self.held)))
            prefix = text(tokens, tenant=tenant)
            index = len(prefix.links) - 1
            node = self.store._tree.nodes[prefix.links[-1].key]
            assert content(self.store, node.ref(group, index, 1)) == b"".join(payload(prefix, index, group, LENGTHS))

    @rule(tenant=TENANTS, talk=TALKS)
    def forget(self, tenant, talk):
        before = set(self.held)
        gone = self.store.forget(talk, tenant)
        mine = {one for one in before if self.on_path(one, [(tenant, talk)])}
        self.ended.pop((tenant, talk), None)
        if self.pinned == (tenant, talk):
            self.pinned = None
        kept = {one for one in before if self.on_last_path(one, None) and one[2] == "full"}
        unheld = {one for one in before if not self.on_path(one, self.ended)}
        self.settle((mine | unheld) - kept)
        assert gone.blocks == len(before - self.held)
        alone = {one for one in mine if not self.on_path(one, self.ended)}
        assert not alone & self.held, "something of a forgotten conversation is still here"

    @rule(tenant=TENANTS, talk=TALKS)
    def pin(self, tenant, talk):
        if self.pinned is None:
            self.store.pin(talk, tenant)
            self.pinned = (tenant, talk)

    @rule()
    def unpin(self):
        if self.pinned is not None:
            self.store.unpin(self.pinned[1], self.pinned[0])
            self.pinned = None

    @rule()
    def restart(self):
        self.store.close()
        self.store = open_store(self.root, self.clock, cap=CAP)
        self.pinned = None
        self.settle({one for one in self.held if not (self.on_last_path(one, None) and one[2] == "full")})

    @rule()
    def look_after(self):
        assert self.store.gc() == []
        assert self.store.verify() == []
        self.settle(set())

    @invariant()
    def the_account_is_exact(self):
        usage = self.store.usage()
        assert usage.blocks == len(self.held)
        assert usage.bytes <= CAP
        check_account(self.store, self.root)
        assert len(self.store._tree.nodes) <= 1 + 4 * sum(map(len, self.ended.values())) + 4 * len(self.held) + 10


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

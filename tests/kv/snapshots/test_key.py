"""What must be the same before a snapshot may be used."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from pagein.kv.snapshots.key import Fingerprint, tenant_tag
from tests.kv.snapshots.build import FINGERPRINT, fingerprint

CHANGES = {
    "weights": ("b" * 64, "weights: aaaaaaaaaaaa…, the snapshot has bbbbbbbbbbbb…"),
    "quantisation": ("Q4_K_M", "quantisation: Q8_0, the snapshot has Q4_K_M"),
    "kv_type_k": ("q8_0", "KV type of K: f16, the snapshot has q8_0"),
    "kv_type_v": ("bf16", "KV type of V: f16, the snapshot has bf16"),
    "context": (8192, "context: 4096, the snapshot has 8192"),
    "engine": ("torch", "engine: llama_cpp, the snapshot has torch"),
    "build": ("b11550", "engine build: b11549, the snapshot has b11550"),
    "tenant": ("u" * 64, "tenant: another one"),
    "rope": ({"freq_base": "500000"}, "rope freq_base: 10000, the snapshot has 500000"),
    "layout": ({"flash_attention": "on"}, "layout swa_full: off, the snapshot has nothing"),
    "adapters": (("c" * 64,), "adapters: none, the snapshot has cccccccccccc…"),
}


def test_every_field_is_covered():
    """A field that is added gets a case here."""
    assert set(CHANGES) == {field.name for field in fields(Fingerprint)}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_counts_and_is_named(name):
    """One field of another value gives another digest, and the difference names it with both values (scenario 4)."""
    value, words = CHANGES[name]
    other = fingerprint(**{name: value})
    assert other.digest != FINGERPRINT.digest
    assert FINGERPRINT.differences(other) == [words]


def test_equal_fields_give_an_equal_digest_in_any_order():
    """The order in which settings were gathered does not count."""
    turned = fingerprint(layout=dict(reversed(FINGERPRINT.layout.items())))
    assert turned.digest == FINGERPRINT.digest
    assert FINGERPRINT.differences(turned) == []


def test_values_do_not_run_into_each_other():
    """Two texts that join to the same are still two fingerprints, and adapters are ordered."""
    assert fingerprint(engine="ab", build="c").digest != fingerprint(engine="a", build="bc").digest
    assert fingerprint(adapters=("x", "y")).digest != fingerprint(adapters=("y", "x")).digest
    assert fingerprint(adapters=("t" * 64,), tenant="").digest != FINGERPRINT.digest


def test_a_fingerprint_survives_json():
    """What a header holds is read back as it was."""
    back = Fingerprint.from_json(json.loads(json.dumps(FINGERPRINT.to_json())))
    assert back == FINGERPRINT
    assert back.digest == FINGERPRINT.digest


@pytest.mark.parametrize(
    "change",
    [
        {"weights": 3},
        {"context": "4096"},
        {"context": -1},
        {"context": True},
        {"rope": []},
        {"rope": {"a": 1}},
        {"adapters": "x"},
        {"adapters": [1]},
        {"build": "x" * 2000},
        {"layout": {str(i): "" for i in range(65)}},
        {"unknown": "x"},
    ],
    ids=str,
)
def test_wrong_json_is_refused(change):
    """A header of a hostile file cannot bring other types or sizes."""
    with pytest.raises(ValueError, match="fingerprint"):
        Fingerprint.from_json({**FINGERPRINT.to_json(), **change})


def test_a_tenant_tag_hides_key_and_secret():
    """Another tenant or another secret is another tag, and neither is in it."""
    tag = tenant_tag(b"secret", "key-1")
    assert tag == tenant_tag(b"secret", "key-1")
    assert len({tag, tenant_tag(b"secret", "key-2"), tenant_tag(b"other", "key-1"), tenant_tag(b"secret", "")}) == 4
    assert "key" not in tag
    assert "secret" not in tag

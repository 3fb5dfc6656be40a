"""A split model served in fewer bits, and only if it is signed by the key that the options name."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers

from pagein import load_parts
from pagein.catalog.split.plan import Role
from pagein.engines.tasks.book import TaskBook
from pagein.errors import PlanRefused
from pagein.parts.splitting.analyse import analyse
from pagein.parts.splitting.apply import apply
from tests.engines.tasks.conftest import language_model
from tests.engines.tasks.test_answers import write
from tests.parts.models import mapping

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A language model wide enough to be packed, split with files in 8 and 4 bits."""
    root = tmp_path_factory.mktemp("wide")
    base = language_model(root / "base", hidden_size=128, intermediate_size=256)
    tasks = mapping(plain={"kind": "generate", "samples": ["ab"]}, vector={"kind": "embed", "samples": ["ab"]})
    apply(analyse(base, tasks), root / "split", ["int8", "int4"])
    return root / "split"


def in_library(folder, precision: str) -> str:
    """What a program writes that loads the split in a precision."""
    model = load_parts(folder, precision=precision, sweep_seconds=None)
    tokeniser = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokeniser("abc", return_tensors="pt").input_ids
    found = model.generate(ids, task="plain", max_new_tokens=16, do_sample=False, pad_token_id=0)
    model.pagein.close()
    return tokeniser.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


async def test_a_split_is_served_in_fewer_bits(run, wide):
    """In the precision of the options, as a program has it, by fewer bytes; without the option as stored."""
    texts, sizes = {}, {}
    for precision in ("int8", "int4", None):
        running = run(wide, options={"precision": precision} if precision else {})
        texts[precision] = await write(running, "plain", "abc")
        assert texts[precision] == in_library(wide, precision or "stored")
        parts = (await running.look())["parts"]
        assert {one["precision"] for one in parts if one["role"] == "backbone"} == {precision or "stored"}
        sizes[precision] = sum(one["bytes"] for one in parts)
    assert sizes["int4"] < sizes["int8"] < 0.5 * sizes[None]
    assert texts["int4"] != texts[None]


def key_pair(folder) -> tuple[bytes, dict[str, str]]:
    """A private key, and the options that trust its public one."""
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    from cryptography.hazmat.primitives import serialization as text

    key = ec.generate_private_key(ec.SECP256R1())
    public = folder / "public.pem"
    public.write_bytes(key.public_key().public_bytes(text.Encoding.PEM, text.PublicFormat.SubjectPublicKeyInfo))
    private = key.private_bytes(text.Encoding.PEM, text.PrivateFormat.PKCS8, text.NoEncryption())
    return private, {"trust": str(public)}


async def test_only_what_the_key_signed_is_served(run, wide, tmp_path):
    """An unsigned split is refused at the start; a signed one is served, and takes up no plan that is not."""
    private, options = key_pair(tmp_path)
    from pagein.parts.files.signing import sign_split
    from pagein.parts.splitting.joining import join
    from tests.parts.served import source, torch

    folder = shutil.copytree(wide, tmp_path / "split")
    with pytest.raises(PlanRefused, match="only signed splits"):
        run(folder, options=options)
    sign_split(folder, private)
    running = run(folder, options=options)
    assert await write(running, "plain", "abc") == in_library(wide, "stored")
    join(folder, "more", {"more/lm_head.bias": source(torch.ones(3))}, {}, {}, Role.ADAPTER)
    reply = await running.tell({"refresh": True})
    assert reply.status >= 400
    assert "signed" in str(reply.body)
    assert "more" not in running.parts.plan.parts


def test_a_tokeniser_that_changes_while_it_is_read_is_not_served(run, wide, tmp_path, monkeypatch):
    """Tokenisers are read by their paths, after the split was checked: so it is checked once more."""
    private, options = key_pair(tmp_path)
    from pagein.parts.files.signing import sign_split

    folder = shutil.copytree(wide, tmp_path / "split")
    sign_split(folder, private)

    def change_first(*arguments):
        with (folder / "tokenizer_config.json").open("a") as file:
            file.write(" ")
        return TaskBook(*arguments)

    monkeypatch.setattr("pagein.engines.parts.TaskBook", change_first)
    with pytest.raises(PlanRefused, match="has changed since it was signed"):
        run(folder, options=options)

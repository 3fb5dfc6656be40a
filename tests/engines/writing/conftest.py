"""A tiny model with a tokeniser of bytes, as transformers writes both, behind the real engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagein.engines.contract import Engine, Started, find_engine
from pagein.protocol import WorkerSpec

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
LAYERS = 6
ROOMY = 4 * 1024**3
PRINTABLE = 94
"""The first tokens are the printable letters: text of them becomes the same tokens again."""


def write_tokeniser(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """Every byte is a token; 256 begins and 257 ends a text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE({**letters, "<s>": 256, "</s>": 257}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write the folder of a tiny model of a kind, once."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    made: dict[tuple[str, str | None], Path] = {}

    def act(kind: str = "llama", template: str | None = TEMPLATE) -> Path:
        if (kind, template) not in made:
            folder = made[kind, template] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(1)
            # fp32: what is reused and what is computed in one pass differ in the last bits; in bf16 these choose tokens
            exact = kind in ("plain", "windows")
            model = KINDS[kind](transformers).to(torch.float32 if exact else torch.bfloat16)
            if kind in ("llama", "plain"):
                model.lm_head.weight.data *= 8  # so that greedy text does not repeat one token
            if exact:
                model.lm_head.weight.data[PRINTABLE:] = 0  # never the likeliest
            model.save_pretrained(folder, max_shard_size="100KB")
            write_tokeniser(folder, template=template)
        return made[kind, template]

    return act


_SMALL = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
KINDS: dict[str, Callable[[Any], Any]] = {
    "llama": lambda t: t.LlamaForCausalLM(
        t.LlamaConfig(**_SMALL, num_hidden_layers=LAYERS, num_key_value_heads=2, max_position_embeddings=256)
    ),
    "plain": lambda t: KINDS["llama"](t),
    "windows": lambda t: t.Gemma3ForCausalLM(
        t.Gemma3TextConfig(
            **_SMALL,
            num_hidden_layers=LAYERS,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=64,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            max_position_embeddings=1024,
            eos_token_id=257,
            pad_token_id=0,
            bos_token_id=256,
        )
    ),
    "t5": lambda t: t.T5ForConditionalGeneration(
        t.T5Config(
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=3,
            num_heads=4,
            vocab_size=258,
            decoder_start_token_id=0,
            eos_token_id=257,
            pad_token_id=0,
        )
    ),
    "bert": lambda t: t.BertModel(t.BertConfig(**_SMALL, num_hidden_layers=3, max_position_embeddings=128)),
}


class Running:
    """A started engine."""

    def __init__(self, engine: Engine, started: Started) -> None:
        self.engine, self.started = engine, started

    @property
    def endpoint(self) -> Any:
        """Where it answers."""
        return self.started.endpoint

    @property
    def plan(self) -> Any:
        """The plan that the model has now."""
        return self.engine._model.pagein.plan

    @property
    def streaming(self) -> int:
        """An allowance in bytes with which a third of the blocks stays."""
        from pagein.engines.transformers import SPARE

        needs = self.plan.needs
        return needs.fixed + needs.head + (needs.whole - needs.fixed - needs.head) // 2 + SPARE


@pytest.fixture
def run(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    """Start the engine on a tiny model; no disk is probed: tests compare texts, not speeds."""
    from pagein.weights import auto
    from tests.weights.conftest import SPEED

    monkeypatch.setattr(auto, "probe", lambda files: SPEED)
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:

        def act(kind: str = "llama", template: str | None = TEMPLATE, **fields: Any) -> Running:
            given = {"context": 128, "parallel": 3, "threads": 2, "allowance": {"ram": ROOMY}} | fields
            given.setdefault("path", str(tiny(kind, template)))
            spec = WorkerSpec("m", "transformers", "t", folder, **given)
            engine = find_engine("transformers")(spec)
            engines.append(engine)
            return Running(engine, engine.start())

        yield act
        for engine in engines:
            engine.stop()

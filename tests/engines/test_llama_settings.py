"""How llama.cpp is set up."""

from __future__ import annotations

import pytest

from pagein.engines.llama_settings import library_parameters, resolve, server_arguments, server_environment
from pagein.errors import ConfigError, LoadFailed
from pagein.protocol import Capability, WorkerSpec


@pytest.fixture
def settings(tmp_path):
    """Resolve the settings of a model with options and spec fields."""
    (tmp_path / "m.gguf").touch()

    def make(options=None, **fields):
        given = {"name": "m", "engine": "llama_cpp", "token": "t", "socket_dir": "/run", "threads": 2}
        return resolve(WorkerSpec(**(given | {"path": str(tmp_path / "m.gguf"), "options": options or {}} | fields)))

    return make


def valued(arguments):
    """The arguments as a mapping; those without a value map to None."""
    follows = [*arguments[1:], "--"]
    return {
        a: (b if not b.startswith("--") else None) for a, b in zip(arguments, follows, strict=True) if a.startswith("-")
    }


def test_every_buffer_is_set_explicitly(settings):
    """llama.cpp's own defaults (8 GiB of cached prompts, 32 checkpoints, a context from the file) never apply."""
    chosen = settings(context=2048, parallel=3)
    arguments, environment = valued(server_arguments(chosen)), server_environment(chosen)
    assert arguments["--ctx-size"] == "6144"
    assert (arguments["--parallel"], arguments["--ubatch-size"], arguments["--batch-size"]) == ("3", "256", "2048")
    assert (arguments["--cache-type-k"], arguments["--cache-type-v"]) == ("f16", "f16")
    assert environment["LLAMA_ARG_CACHE_RAM"] == "0"
    assert environment["LLAMA_ARG_CTX_CHECKPOINTS"] == "2"
    assert environment["LLAMA_ARG_FIT"] == "off"


def test_the_answer_names_the_model_as_configured(settings):
    """Clients see the name that they asked for, not a path."""
    assert valued(server_arguments(settings()))["--alias"] == "m"


def test_threads_are_the_configured_ones_and_never_poll(settings):
    """Two models on the same cores must not spin against each other."""
    arguments = valued(server_arguments(settings(threads=5)))
    assert (arguments["--threads"], arguments["--threads-batch"], arguments["--poll"]) == ("5", "5", "0")


@pytest.mark.parametrize(
    ("device", "options", "layers", "ubatch", "hidden"),
    [("cpu", {}, 0, 256, True), ("cpu", {"gpu_layers": 9}, 0, 256, True), ("cuda:1", {}, 999, 512, False),
     ("cuda:0", {"gpu_layers": 9, "ubatch": 64}, 9, 64, False)],
)  # fmt: skip
def test_the_device_decides_about_layers_and_buffers(settings, device, options, layers, ubatch, hidden):
    """On a CPU nothing goes to a card, not even a context."""
    chosen = settings(options, device=device)
    assert (chosen.gpu_layers, chosen.ubatch) == (layers, ubatch)
    assert (server_environment(chosen).get("LLAMA_ARG_DEVICE") == "none") == hidden


def test_a_text_to_embed_is_computed_at_once(settings):
    """Pooling over all tokens needs them in one batch; pooling by the last one does not."""
    assert settings({"embedding": True, "pooling": "mean"}, context=1000).ubatch == 1000
    assert settings({"embedding": True}, context=100).ubatch == 256
    assert settings({"embedding": True, "pooling": "last"}, context=1000).ubatch == 256
    assert settings({"embedding": True, "ubatch": 512}, context=1000).ubatch == 512


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, [Capability.CHAT, Capability.COMPLETION]), ({"embedding": True}, [Capability.EMBEDDING]),
     ({"rerank": True}, [Capability.RERANK])],
)  # fmt: skip
def test_capabilities_follow_the_options(settings, options, wanted):
    """One server does one kind of work."""
    assert settings(options).capabilities == wanted


def test_further_arguments_come_last(settings):
    """What the user writes wins over what Pagein writes."""
    assert server_arguments(settings({"args": ["--threads", "9"]}))[-2:] == ["--threads", "9"]


def test_a_missing_file_is_named(settings, tmp_path):
    """Not llama.cpp's words but the path."""
    with pytest.raises(LoadFailed, match=r"there is no file /no/such\.gguf"):
        settings(path="/no/such.gguf")
    with pytest.raises(ConfigError, match="needs a model file"):
        settings(path=None)


@pytest.mark.engines
def test_the_library_gets_the_same_settings(settings):
    """Program and library are set up alike, so that one estimate holds for both."""
    pytest.importorskip("xllamacpp")
    options = {"cache_ram": 7, "cache_type_k": "q8_0", "flash_attention": True, "mmap": False, "checkpoints": 5}
    parameters = library_parameters(settings(options, context=512, parallel=2))
    assert (parameters.n_ctx, parameters.n_parallel) == (1024, 2)
    assert (parameters.n_batch, parameters.n_ubatch) == (2048, 256)
    assert (parameters.cache_ram_mib, parameters.n_ctx_checkpoints) == (7, 5)
    assert (parameters.cpuparams.n_threads, parameters.cpuparams_batch.n_threads) == (2, 2)
    assert parameters.cache_type_k.name == "GGML_TYPE_Q8_0"
    assert parameters.flash_attn_type.name == "LLAMA_FLASH_ATTN_TYPE_ENABLED"
    assert parameters.load_mode.name == "LLAMA_LOAD_MODE_NONE"
    assert parameters.model_alias == {"m"}
    assert not parameters.fit_params
    assert not parameters.ui


@pytest.mark.engines
def test_arguments_for_a_program_are_refused_by_the_library(settings):
    """No option is dropped in silence."""
    pytest.importorskip("xllamacpp")
    with pytest.raises(ConfigError, match="'args' needs a llama-server"):
        library_parameters(settings({"args": ["--x"]}))

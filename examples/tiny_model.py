"""A tiny Qwen2 model, made on the spot, for machines without a GPU or a network.

    python -m examples.tiny_model DIRECTORY

Its weights are random but wide (`initializer_range` 0.3), so that greedy output depends
on the prompt: a KV cache that did not arrive changes what is generated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

_VOCAB = 512
_HIDDEN = 128
_LAYERS = 2
#: The CPU attention refuses smaller heads at the first step.
_HEAD_DIM = 64
_MAX_POSITIONS = 4096

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

#: Text the tokenizer is trained on; its alphabet holds every byte, so any text passes.
#: It is long enough to fill the vocabulary: a token id without text could be generated
#: and would reach the client as an empty piece of a stream.
_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "prefill reads the prompt, decode writes the answer, one token at a time",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "system user assistant tool function call response",
    "Several engines stand behind one server, and a router sends each request to two "
    "of them. The first computes keys and values for the whole prompt, the second "
    "fetches these blocks and continues where the first ended.",
    "What matters to people who wait is how soon something appears and how smoothly it "
    "goes on; what matters to owners is how much work their machines finish per hour.",
    "When nobody knows how long an answer will become, guess from earlier answers, "
    "watch the queues, and keep some memory free for those already running.",
]

_CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one: <tool_call>{"name": ..., "arguments": ...}</tool_call>
<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tiny_model(
    directory: Path, *, seed: int = 0, hidden: int = _HIDDEN, layers: int = _LAYERS
) -> Path:
    """Make the model in `directory`, unless it is there; returns the directory.

    Args:
        hidden: its width, a multiple of 64.
        layers: how many.
    """
    if hidden % _HEAD_DIM:
        raise ValueError(f"hidden must be a multiple of {_HEAD_DIM}: {hidden}")
    marker = directory / "made-with.json"
    made_with = {"seed": seed, "hidden": hidden, "layers": layers}
    recipe = json.dumps({**made_with, "script": _own_hash()})
    if marker.exists() and marker.read_text() == recipe:
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there: nobody sees half a model.
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        _save_tokenizer(made)
        _save_model(made, seed, hidden, layers)
        (made / marker.name).write_text(recipe)
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)
    return directory


def _own_hash() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def make_tiny_lora(directory: Path, *, seed: int = 0, rank: int = 8) -> Path:
    """Make a LoRA adapter for the tiny model, strong enough to change its output."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    widths = {"q_proj": _HIDDEN, "v_proj": _HEAD_DIM}
    tensors = {}
    for layer in range(_LAYERS):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(rank, _HIDDEN, generator=generator)
            b = torch.randn(width, rank, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
        "base_model_name_or_path": "tiny",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _save_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == _VOCAB, "the corpus is too short"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=_MAX_POSITIONS,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _save_model(directory: Path, seed: int, hidden: int, layers: int) -> None:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD_DIM,
        num_key_value_heads=1,
        head_dim=_HEAD_DIM,
        max_position_embeddings=_MAX_POSITIONS,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        # Half precision rounds differently by batch, and tests compare outputs exactly.
        dtype="float32",
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_tiny_model(options.directory, seed=options.seed))


if __name__ == "__main__":
    main()

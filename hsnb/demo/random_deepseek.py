"""Random DeepseekV3 models, small enough for a CPU and shaped so that SGLang, vLLM and transformers all load them.

They say nothing about text. They exercise multi-head latent attention, the mixture of experts and, as `kimi-shape`, Kimi's
61 layers of 7168, with a residual stream that stays finite and that every layer changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsnb.demo import quiet_transformers

SEED = 20250101
VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|User|>", "<|Assistant|>")  # ids 0..4
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}<|User|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|Assistant|>{{ message['content'] }}</s>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
# The tokenizer's merges come from this text alone, so that the same ids come out on every machine and Python version.
_TEXT = """\
The residual stream is a sum: every decoder layer reads it, adds what attention found, then adds what the experts made of it.
Boundary zero is the embedding of the tokens; the last boundary is what the final norm turns into the logits of the next token.
A drafter is trained on the states that the serving engine will feed it, so the states have to be taken from that very engine.
Which of them is which must be written down with the data: one layer off, and the drafter learns the wrong thing well.
the quick brown fox jumps over the lazy dog while some other words wait here: and of to in is that for it with as was on be at by
this from have or an they which one you were all their there been would when who will more if no out so what up said about into
def return self none true false import class value name type list string number file function object method argument default
What does this function do? How is it used? Returns the object. Raises an error when the value is not valid. See also the module.
"""


@dataclass(frozen=True)
class Shape:
    """The sizes that differ between the models, the dtype stored, and the spread of the random weights."""

    dtype: str
    std: float
    context: int
    yarn_factor: float
    sizes: dict[str, int]


SHAPES = {
    "tiny-deepseek": Shape(
        dtype="float32", std=0.05, context=4096, yarn_factor=4.0,
        sizes={"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 128, "moe_intermediate_size": 32},
    ),
    "kimi-shape": Shape(
        dtype="bfloat16", std=0.02, context=131072, yarn_factor=32.0,
        sizes={"hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 64, "moe_intermediate_size": 16},
    ),
}  # fmt: skip


def make(folders: dict[str, Path]) -> None:
    """Save the model and the tokenizer of each name into its folder."""
    for name, folder in folders.items():
        shape = SHAPES[name]
        make_tokenizer(shape.context).save_pretrained(folder)
        with quiet_transformers():
            make_model(shape).save_pretrained(folder)
        _complete_config(folder / "config.json")


def make_tokenizer(context: int) -> Any:
    """Return a byte-level BPE of 512 tokens with a chat template in DeepSeek's manner; any text survives encode and decode."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    bos, eos, pad = SPECIAL_TOKENS[:3]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, model_max_length=context)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(shape: Shape) -> Any:
    """Return a DeepseekV3ForCausalLM of `shape` with seeded random weights.

    Built on the meta device first: the default initialisation of the 7168-wide model takes minutes and would be overwritten.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    dtype = getattr(torch, shape.dtype)
    config = DeepseekV3Config(
        **shape.sizes,
        vocab_size=VOCAB_SIZE, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
        # The latent of 512 + 64 is the only size that vLLM's CPU decode kernel for MLA has.
        q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, num_mtp_layers=0,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, max_position_embeddings=shape.context,
        # yarn, as the real ones have: vLLM 0.32 on a CPU computes DeepSeek's plain rope wrongly (2.5-17 % off).
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 50000.0, "factor": shape.yarn_factor, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": int(shape.context / shape.yarn_factor),
        },
        dtype=dtype,
    )  # fmt: skip
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, shape.std, generator=generator)
            elif name.endswith("norm.weight"):
                weight.uniform_(0.8, 1.2, generator=generator)  # not all one: a norm applied or forgotten must be seen
            else:
                weight.zero_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = torch.empty(buffer.shape, dtype=torch.float32).uniform_(-0.02, 0.02, generator=generator)
    return model


def _complete_config(file: Path) -> None:
    """Add what real DeepSeek-V3 configs carry, engines need and transformers 5 leaves out.

    rope_scaling and rope_theta repeat rope_parameters for engines on transformers 4, which would use plain rope in silence.
    """
    config = json.loads(file.read_text())
    rope = config["rope_parameters"]
    config |= {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"},
    }
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

#!/usr/bin/env python3
"""Writes a Llama model of a GGUF file as a folder like Hugging Face's: BF16 safetensors, config.json, tokenizer.json, tokenizer_config.json."""
import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Types of tokens in GGUF; the others are text.
CONTROL, USER_DEFINED = 3, 4


def main():
    if len(sys.argv) != 3:
        sys.exit("gguf_to_safetensors: expected a GGUF file and a folder")
    reader, folder = GGUFReader(sys.argv[1]), Path(sys.argv[2])

    def get(key, default=None):
        field = reader.get_field(key)
        return default if field is None else field.contents()

    # Only what is known to come out right. Other architectures have rows of Q and K in another
    # order; other tokenizers cut words otherwise.
    for key, expected in [("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")]:
        if get(key) != expected:
            sys.exit(f"gguf_to_safetensors: {key} is {get(key)!r}, but only {expected!r} is known")
    folder.mkdir(parents=True)
    config = model_config(get, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    save_file(dict(weight(tensor, heads) for tensor in reader.tensors), folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "tokenizer.json", tokenizer(get))
    write(folder / "tokenizer_config.json", tokenizer_config(get))
    write(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    write(folder / "config.json", config)


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def weight(tensor, heads):
    """(name, tensor) of the folder."""
    parts = tensor.name.removesuffix(".weight").split(".")
    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if parts[0] != "blk":
        return f"{WHOLE[parts[0]]}.weight", values.bfloat16()
    if parts[2] in heads:
        # GGUF has the two halves of a head interleaved, for rotation in pairs of neighbours.
        rows, columns = values.shape
        values = values.reshape(heads[parts[2]], rows // heads[parts[2]] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns).contiguous()
    return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight", values.bfloat16()


def model_config(get, tied):
    heads = get("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": get("llama.embedding_length"),
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": round(get("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": get("llama.rope.freq_base", 10_000.0),
        "tie_word_embeddings": tied,
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "attention_bias": False,
        "mlp_bias": False,
    }


def special(get):
    kinds = zip(get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type"))
    return [(number, text, kind == CONTROL) for number, (text, kind) in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]


def tokenizer(get):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, "special": control, **flags} for number, text, control in special(get)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(get("tokenizer.ggml.tokens"))},
            "merges": get("tokenizer.ggml.merges"),
        },
    }


def tokenizer_config(get):
    tokens = get("tokenizer.ggml.tokens")
    found = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": get("llama.context_length"),
        "chat_template": get("tokenizer.chat_template"),
    }
    for role in ("bos", "eos", "unknown", "padding"):
        number = get(f"tokenizer.ggml.{role}_token_id")
        if number is not None:
            found[{"unknown": "unk", "padding": "pad"}.get(role, role) + "_token"] = tokens[number]
    return found


if __name__ == "__main__":
    main()

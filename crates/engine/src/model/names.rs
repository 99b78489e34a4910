//! What the two kinds of files call the tensors of a model.

use baton_formats::ModelFile;

/// A part of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Embedding,
    OutputNorm,
    Head,
    AttentionNorm,
    Query,
    Key,
    Value,
    Output,
    FeedForwardNorm,
    Gate,
    Up,
    Down,
}

/// How a file names parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    Gguf,
    HuggingFace,
}

impl Names {
    pub fn of(file: &ModelFile) -> Self {
        match file {
            ModelFile::Gguf(_) => Self::Gguf,
            ModelFile::Safetensors(_) => Self::HuggingFace,
        }
    }

    pub fn weight(self, part: Part, layer: usize) -> String {
        format!("{}.weight", self.stem(part, layer))
    }

    pub fn bias(self, part: Part, layer: usize) -> String {
        format!("{}.bias", self.stem(part, layer))
    }

    /// `layer` counts only for parts of a layer.
    fn stem(self, part: Part, layer: usize) -> String {
        let (gguf, hugging_face) = match part {
            Part::Embedding => ("token_embd", "model.embed_tokens"),
            Part::OutputNorm => ("output_norm", "model.norm"),
            Part::Head => ("output", "lm_head"),
            Part::AttentionNorm => ("attn_norm", "input_layernorm"),
            Part::Query => ("attn_q", "self_attn.q_proj"),
            Part::Key => ("attn_k", "self_attn.k_proj"),
            Part::Value => ("attn_v", "self_attn.v_proj"),
            Part::Output => ("attn_output", "self_attn.o_proj"),
            Part::FeedForwardNorm => ("ffn_norm", "post_attention_layernorm"),
            Part::Gate => ("ffn_gate", "mlp.gate_proj"),
            Part::Up => ("ffn_up", "mlp.up_proj"),
            Part::Down => ("ffn_down", "mlp.down_proj"),
        };
        let of_model = matches!(part, Part::Embedding | Part::OutputNorm | Part::Head);
        match (self, of_model) {
            (Self::Gguf, true) => gguf.to_owned(),
            (Self::Gguf, false) => format!("blk.{layer}.{gguf}"),
            (Self::HuggingFace, true) => hugging_face.to_owned(),
            (Self::HuggingFace, false) => format!("model.layers.{layer}.{hugging_face}"),
        }
    }

    /// Whether a tensor that no part asked for may be left alone: it repeats what the configuration
    /// says, or a tied head.
    pub fn is_spare(self, name: &str) -> bool {
        match self {
            Self::Gguf => name == "rope_freqs.weight",
            Self::HuggingFace => name == "lm_head.weight" || name.ends_with(".rotary_emb.inv_freq"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_names_are_those_of_gguf_and_hugging_face() {
        assert_eq!(Names::Gguf.weight(Part::Head, 0), "output.weight");
        assert_eq!(Names::Gguf.bias(Part::Query, 7), "blk.7.attn_q.bias");
        assert_eq!(Names::HuggingFace.weight(Part::Down, 3), "model.layers.3.mlp.down_proj.weight");
        assert!(Names::HuggingFace.is_spare("model.layers.0.self_attn.rotary_emb.inv_freq"));
        assert!(!Names::Gguf.is_spare("blk.0.attn_q_norm.weight"));
    }
}

//! Tokenizers of model files, and text for them.

use baton_formats::{Gguf, ModelFile};
use baton_text::{ChatTemplate, DecodeOptions, EncodeOptions, Tokenizer};

use super::fixture;
use crate::input::{END, join, text};

pub(super) const JSON_WORDS: &[&str] = &[
    "\"type\":",
    "\"BPE\"",
    "\"ByteLevel\"",
    "\"Metaspace\"",
    "\"Sequence\"",
    "\"Split\"",
    "\"Replace\"",
    "\"ByteFallback\"",
    "\"Fuse\"",
    "\"Strip\"",
    "\"Prepend\"",
    "\"NFC\"",
    "\"NFKC\"",
    "\"Lowercase\"",
    "\"Precompiled\"",
    "\"precompiled_charsmap\":\"AAAA\"",
    "\"BertNormalizer\"",
    "\"TemplateProcessing\"",
    "\"BertProcessing\"",
    "\"RobertaProcessing\"",
    "\"Digits\"",
    "\"Punctuation\"",
    "\"Whitespace\"",
    "\"UnicodeScripts\"",
    "\"CharDelimiterSplit\"",
    "\"pattern\":{\"Regex\":\"(a|b)*c\"}",
    "\"pattern\":{\"String\":\"\"}",
    "\"behavior\":\"Isolated\"",
    "\"invert\":true",
    "\"pretokenizers\":[",
    "\"normalizers\":[",
    "\"decoders\":[",
    "\"truncation\":{\"direction\":\"Right\",\"max_length\":1,\"strategy\":\"LongestFirst\",\"stride\":1}",
    "\"padding\":",
    "\"fuse_unk\":true",
    "\"byte_fallback\":true",
    "\"ignore_merges\":true",
    "\"unk_token\":",
    "\"end_of_word_suffix\":\"\"",
    "\"special\":true",
    "\"lstrip\":true",
    "\"normalized\":true",
    "\"single_word\":true",
    "null",
    "\"content\":\"\"",
    "\"start\":1",
    "\"stop\":1",
];
pub(super) const GGUF_WORDS: &[&str] = &[
    "tokenizer.ggml.model",
    "gpt2",
    "llama",
    "tokenizer.ggml.pre",
    "llama-bpe",
    "qwen2",
    "tekken",
    "smollm",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.chat_template",
    "<0x41>",
    "▁",
];

/// Text for each tokenizer, besides what the input has.
const TEXT: &str = "Hello <s>  wörld, it's 12345 <|im_end|>é😀\u{301}\n\n\t  x\u{0}▁a";
const MAX_TEXT_BYTES: usize = 4 << 10;

/// `tokenizer.json`, and text after the end of it.
pub(super) fn json(input: &[u8]) {
    let (json, given) = split(input);
    if let Ok(tokenizer) = Tokenizer::from_tokenizer_json(json) {
        exercise(&tokenizer, text(given));
    }
}

/// The same in a GGUF file, with the chat template that is in it.
pub(super) fn gguf(input: &[u8]) {
    let Ok(file) = Gguf::parse(input.to_vec()) else { return };
    let model = ModelFile::Gguf(file);
    let Ok(tokenizer) = Tokenizer::from_model(&model) else { return };
    exercise(&tokenizer, text(&input[..input.len().min(MAX_TEXT_BYTES)]));
    // One that cannot be compiled is an error.
    let _ = ChatTemplate::from_model(&model, &tokenizer);
}

fn split(input: &[u8]) -> (&[u8], &[u8]) {
    let end = input.iter().position(|byte| *byte == END);
    end.map_or((input, &[]), |end| (&input[..end], &input[end + 1..]))
}

fn exercise(tokenizer: &Tokenizer, given: &str) {
    let size = tokenizer.vocab_size();
    for (add_special, parse_special, text) in [(true, true, TEXT), (false, false, TEXT), (true, true, given)] {
        let text = &text[..text.floor_char_boundary(MAX_TEXT_BYTES)];
        let Ok(ids) = tokenizer.encode(text, EncodeOptions { add_special, parse_special }) else { continue };
        assert!(ids.iter().all(|id| *id < size), "{ids:?} of {size} tokens");
        tokenizer.decode(&ids, DecodeOptions { skip_special: false, starts_text: true });
    }
    // As a model may draw them.
    let drawn: Vec<_> = (0..size.min(64)).chain([size, u32::MAX]).collect();
    let mut detokenizer = tokenizer.detokenizer();
    let mut said: String = drawn.iter().map(|token| detokenizer.push(*token)).collect();
    said.push_str(&detokenizer.finish());
    assert!(tokenizer.eos_ids().iter().all(|id| tokenizer.token_bytes(*id).is_some()));
    let _ = (tokenizer.longest_token(), tokenizer.special_token("<|im_end|>"), tokenizer.add_bos());
}

/// Byte-level and SentencePiece, each with few tokens, so that a change is likely to matter.
pub(super) fn json_seeds() -> Vec<Vec<u8>> {
    let byte_level = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":8,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{L}+|\\p{N}{1,3}|\\s+"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"<s>":{"id":"<s>","ids":[8],"tokens":["<s>"]}}},"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":true,"vocab":{"H":0,"e":1,"l":2,"o":3,"Ġ":4,"He":5,"ll":6,"Hell":7},"merges":[["H","e"],["l","l"],["He","ll"]]}}"#;
    let sentence_piece = r#"{"added_tokens":[{"id":0,"content":"<unk>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false},{"id":1,"content":"<s>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]},"pre_tokenizer":null,"post_processor":null,"decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","unk_token":"<unk>","fuse_unk":true,"byte_fallback":true,"vocab":{"<unk>":0,"<s>":1,"<0x41>":2,"▁":3,"H":4,"e":5,"▁H":6,"l":7},"merges":["▁ H"]}}"#;
    vec![
        join(&[byte_level.as_bytes(), "Hello <s> world 123".as_bytes()]),
        join(&[sentence_piece.as_bytes(), "He  <unk>A".as_bytes()]),
        fixture("crates/text/tests/fixtures/llama3.json"),
        fixture("crates/text/tests/fixtures/llama.json"),
    ]
}

pub(super) fn gguf_seeds() -> Vec<Vec<u8>> {
    ["llama3", "llama", "qwen2"].map(|name| fixture(&format!("crates/text/tests/fixtures/{name}.gguf"))).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokenizer_seeds_are_valid() {
        for seed in json_seeds() {
            Tokenizer::from_tokenizer_json(split(&seed).0).expect("a valid file");
        }
        for seed in gguf_seeds() {
            Tokenizer::from_model(&ModelFile::Gguf(Gguf::parse(seed).expect("GGUF"))).expect("a valid file");
        }
    }
}

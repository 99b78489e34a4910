//! Files and texts that no model came with: an error or a result, in bounded time, and no panic.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use baton_formats::{Gguf, ModelFile};
use baton_text::{DecodeOptions, EncodeOptions, Tokenizer};

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Draws changes to files.
struct Random(baton_types::Random);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        (self.0.next_u64() % bound as u64) as usize
    }

    /// Changes, removes or doubles a few bytes.
    fn mutate(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..1 + self.below(2) {
            let at = self.below(bytes.len());
            match self.below(4) {
                0 => bytes[at] = self.below(256) as u8,
                1 => bytes[at] ^= 1 << self.below(8),
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, bytes[at]),
            }
        }
        bytes
    }
}

/// A damaged tokenizer that still loads must work.
fn exercise(tokenizer: &Tokenizer) {
    if let Ok(ids) =
        tokenizer.encode("Hello <s> 12 é😀\n\n  x", EncodeOptions { add_special: true, parse_special: true })
    {
        tokenizer.decode(&ids, DecodeOptions::default());
    }
    tokenizer.eos_ids().iter().for_each(|&id| assert!(tokenizer.token_bytes(id).is_some()));
}

#[test]
fn damaged_gguf_tokenizer_is_refused_or_works() {
    let mut random = Random(baton_types::Random::new(1));
    let mut loaded = 0;
    let mut refused = 0;
    for name in ["llama3.gguf", "llama.gguf", "qwen2.gguf"] {
        let bytes = fixture(name);
        for _ in 0..200 {
            let mut bytes = bytes.clone();
            for _ in 0..1 + random.below(2) {
                let at = random.below(bytes.len());
                bytes[at] = [random.below(256) as u8, bytes[at] ^ (1 << random.below(8))][random.below(2)];
            }
            let Ok(gguf) = Gguf::parse(bytes) else { continue };
            match Tokenizer::from_model(&ModelFile::Gguf(gguf)) {
                Ok(tokenizer) => {
                    loaded += 1;
                    exercise(&tokenizer);
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(
        loaded > 20 && refused > 20,
        "{loaded} loaded, {refused} refused: the mutations do not reach the tokenizer"
    );
}

#[test]
fn damaged_tokenizer_json_is_refused_or_works() {
    let mut random = Random(baton_types::Random::new(2));
    let mut loaded = 0;
    for name in ["llama3.json", "llama.json", "qwen2.json"] {
        let bytes = fixture(name);
        for _ in 0..150 {
            if let Ok(tokenizer) = Tokenizer::from_tokenizer_json(&random.mutate(&bytes)) {
                loaded += 1;
                exercise(&tokenizer);
            }
        }
        for end in (0..bytes.len()).step_by(997) {
            assert!(Tokenizer::from_tokenizer_json(&bytes[..end]).is_err());
        }
    }
    assert!(loaded > 20, "{loaded} loaded: the mutations do not reach the tokenizer");
}

#[test]
fn unsupported_tokenizer_json_names_its_field() {
    let error = |change: fn(&mut serde_json::Value)| {
        let mut json = serde_json::from_slice(&fixture("smollm.json")).expect("JSON");
        change(&mut json);
        Tokenizer::from_tokenizer_json(json.to_string().as_bytes()).expect_err("refused").to_string()
    };
    assert!(error(|json| json["model"]["type"] = "Unigram".into()).contains("model.type: 'Unigram'"));
    assert!(error(|json| json["model"]["dropout"] = 0.1.into()).contains("model.dropout"));
    assert!(error(|json| json["model"]["merges"][3] = "a zz".into()).contains("model.merges[3]"));
    assert!(error(|json| json["model"]["vocab"]["x y"] = u32::MAX.into()).contains("model.vocab"));
    assert!(error(|json| json["decoder"]["type"] = "WordPiece".into()).contains("decoder"));
    assert!(error(|json| json["added_tokens"] = 5.into()).contains("tokenizer.json"));
}

/// Text that takes time with the square of its length. It does so for regular expressions that
/// backtrack, and for merges that look for the best pair again and again.
#[test]
fn tokenizing_a_long_run_is_not_quadratic() {
    let run = |piece: &str, bytes: usize| piece.repeat(bytes / piece.len());
    for name in ["smollm.gguf", "llama3.gguf", "tekken.gguf", "llama.gguf"] {
        let gguf = Gguf::parse(fixture(name)).expect("GGUF");
        let tokenizer = Tokenizer::from_model(&ModelFile::Gguf(gguf)).expect("a tokenizer");
        for piece in ["a", "the", "1", ".", "\n", "é", "😀", "a ", "'", "ab1. \n", "<", "\u{301}"] {
            let text = run(piece, 200_000);
            let start = Instant::now();
            let ids = tokenizer.encode(&text, PLAIN).expect("text");
            let took = start.elapsed();
            // Quadratic takes minutes.
            assert!(took < Duration::from_secs(5), "{name}: {piece:?} took {took:?}");
            assert_eq!(
                tokenizer.decode(&ids, DecodeOptions { skip_special: true, starts_text: true }),
                text,
                "{name}: {piece:?}"
            );
        }
    }
}

#[test]
fn long_white_space_is_tokenized_as_short_or_refused() {
    let gguf = Gguf::parse(fixture("llama3.gguf")).expect("GGUF");
    let tokenizer = Tokenizer::from_model(&ModelFile::Gguf(gguf)).expect("a tokenizer");
    let tail = "x, it's 123456 of the words  end";
    let encode = |spaces: usize| tokenizer.encode(&(" ".repeat(spaces) + tail), PLAIN);
    let short = encode(8).expect("short");
    let long = encode(500_000).expect("long");
    // If the library gives up cutting, the words after the run are merged as one.
    assert_eq!(long[long.len() - 20..], short[short.len() - 20..]);
    assert!(encode(600_000).expect_err("refused").to_string().starts_with("a run of more than 524288"));
}

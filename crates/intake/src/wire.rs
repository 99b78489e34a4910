//! Counts what a message holds before it is decoded: an empty message in a list takes two bytes on
//! the wire and hundreds in memory.

use std::collections::HashMap;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// Most entries of one list of messages or texts, over the whole message.
pub const MAX_ENTRIES: usize = 65_536;
/// The same of log-probabilities: each token of a prompt may have some.
const MAX_LOGPROBS: usize = 1 << 20;
const LOGPROBS: [&str; 2] = [".baton.v1.TokenLogprobs", ".baton.v1.TopLogprob"];
/// Messages within messages that are looked into; no type of ours is so deep.
const MAX_DEPTH: usize = 32;

/// What is wrong with a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A list is too long.
    #[error("{field}: more than {most} entries")]
    TooMany {
        /// The list.
        field: String,
        /// Entries that are taken.
        most: usize,
    },
    /// It is not a message.
    #[error("the message is malformed")]
    Malformed,
}

/// What the types of a schema look like on the wire.
#[derive(Debug)]
pub struct Schema {
    types: Vec<MessageType>,
    /// What each method takes, by its path: `/package.Service/Method`.
    methods: HashMap<String, Method>,
    /// Fields that are counted.
    counted: usize,
}

#[derive(Debug, Default)]
struct MessageType(HashMap<u32, Field>);

#[derive(Debug)]
struct Field {
    name: String,
    /// Number of its counter, if it is a list of messages or texts.
    counter: Option<usize>,
    /// Most entries of the list.
    most: usize,
    is_number_list: bool,
    is_text: bool,
    /// Type of its messages.
    message: Option<usize>,
}

/// What a method takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Method {
    /// Type of its messages.
    pub input: usize,
    /// Type of its answers.
    pub output: usize,
    /// Whether there may be several.
    pub is_stream: bool,
}

/// What the lists of a message hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages and texts.
    pub entries: usize,
    /// Numbers, at most.
    pub numbers: usize,
    /// Bytes of texts, in lists or not.
    pub text_bytes: usize,
}

/// One scan.
struct Scan<'a> {
    schema: &'a Schema,
    counts: Vec<usize>,
    numbers: usize,
    text_bytes: usize,
}

impl Schema {
    /// Of encoded file descriptors.
    ///
    /// # Errors
    /// They are not.
    pub fn new(descriptors: &[u8]) -> Result<Self, prost::DecodeError> {
        let files = FileDescriptorSet::decode(descriptors)?.file;
        let mut messages = Vec::new();
        for file in &files {
            let package = format!(".{}", file.package());
            file.message_type.iter().for_each(|message| list(&package, message, &mut messages));
        }
        let numbers: HashMap<_, _> = messages.iter().enumerate().map(|(n, (name, _))| (name.as_str(), n)).collect();
        let mut counted = 0;
        let mut field = |field: &FieldDescriptorProto| {
            let message = numbers.get(field.type_name()).copied().filter(|_| field.r#type() == Type::Message);
            let is_number = !matches!(field.r#type(), Type::Message | Type::String | Type::Bytes);
            let is_list = field.label() == Label::Repeated && !is_number;
            let is_text = field.r#type() == Type::String;
            let is_number_list = field.label() == Label::Repeated && is_number;
            let counter = is_list.then(|| {
                counted += 1;
                counted - 1
            });
            let most = if LOGPROBS.contains(&field.type_name()) { MAX_LOGPROBS } else { MAX_ENTRIES };
            (
                field.number() as u32,
                Field { name: field.name().to_owned(), counter, most, is_number_list, is_text, message },
            )
        };
        let types = messages.iter().map(|(_, message)| MessageType(message.field.iter().map(&mut field).collect()));
        let types = types.collect();
        let mut methods = HashMap::new();
        for file in &files {
            for service in &file.service {
                for method in &service.method {
                    let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                    let is_stream = method.client_streaming();
                    let types = (numbers.get(method.input_type()), numbers.get(method.output_type()));
                    if let (Some(&input), Some(&output)) = types {
                        methods.insert(path, Method { input, output, is_stream });
                    }
                }
            }
        }
        Ok(Self { types, methods, counted })
    }

    /// What a method takes; `None`: it is not of these services.
    pub fn method(&self, path: &str) -> Option<Method> {
        self.methods.get(path).copied()
    }

    /// What the lists of an encoded message hold.
    ///
    /// # Errors
    /// One list is too long, or it is no message.
    pub fn count(&self, input: usize, message: &[u8]) -> Result<Counts, WireError> {
        let mut scan = Scan { schema: self, counts: vec![0; self.counted], numbers: 0, text_bytes: 0 };
        scan.message(input, message, MAX_DEPTH)?;
        Ok(Counts { entries: scan.counts.iter().sum(), numbers: scan.numbers, text_bytes: scan.text_bytes })
    }
}

fn list<'a>(prefix: &str, message: &'a DescriptorProto, found: &mut Vec<(String, &'a DescriptorProto)>) {
    let name = format!("{prefix}.{}", message.name());
    message.nested_type.iter().for_each(|nested| list(&name, nested, found));
    found.push((name, message));
}

impl Scan<'_> {
    fn message(&mut self, number: usize, mut rest: &[u8], depth: usize) -> Result<(), WireError> {
        let depth = depth.checked_sub(1).ok_or(WireError::Malformed)?;
        let schema = self.schema;
        while !rest.is_empty() {
            let key = varint(&mut rest)?;
            let payload = match key & 7 {
                0 => varint(&mut rest).map(|_| None)?,
                1 => take(&mut rest, 8).map(|_| None)?,
                2 => {
                    let length = usize::try_from(varint(&mut rest)?).map_err(|_| WireError::Malformed)?;
                    Some(take(&mut rest, length)?)
                }
                5 => take(&mut rest, 4).map(|_| None)?,
                // Groups: nothing of ours has them.
                _ => return Err(WireError::Malformed),
            };
            let field = u32::try_from(key >> 3).ok().and_then(|field| schema.types[number].0.get(&field));
            let Some(field) = field else { continue };
            if field.is_number_list {
                // One that is packed takes a byte at least.
                self.numbers += payload.map_or(1, <[u8]>::len);
            }
            let Some(payload) = payload else { continue };
            if field.is_text {
                self.text_bytes += payload.len();
            }
            if let Some(counter) = field.counter {
                self.counts[counter] += 1;
                if self.counts[counter] > field.most {
                    return Err(WireError::TooMany { field: field.name.clone(), most: field.most });
                }
            }
            if let Some(message) = field.message {
                self.message(message, payload, depth)?;
            }
        }
        Ok(())
    }
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], WireError> {
    let (taken, after) = rest.split_at_checked(length).ok_or(WireError::Malformed)?;
    *rest = after;
    Ok(taken)
}

fn varint(rest: &mut &[u8]) -> Result<u64, WireError> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first().ok_or(WireError::Malformed)?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(WireError::Malformed)
}

#[cfg(test)]
mod tests {
    use baton_proto::{FILE_DESCRIPTORS, v1};
    use v1::generate_request::Prompt;

    use super::*;

    const GENERATE: &str = "/baton.v1.Inference/Generate";
    const EXPLAIN: &str = "/baton.v1.Cluster/Explain";

    fn counts(path: &str, message: &[u8]) -> Result<Counts, WireError> {
        let schema = Schema::new(FILE_DESCRIPTORS).unwrap();
        schema.count(schema.method(path).unwrap().input, message)
    }

    fn count(path: &str, message: &[u8]) -> Result<usize, WireError> {
        counts(path, message).map(|counts| counts.entries)
    }

    fn messages(messages: usize) -> v1::GenerateRequest {
        let prompt = v1::MessagesPrompt { messages: vec![v1::ChatMessage::default(); messages], ..Default::default() };
        v1::GenerateRequest { prompt: Some(Prompt::Messages(prompt)), ..Default::default() }
    }

    #[test]
    fn repeated_field_entries_are_counted_in_nested_messages() {
        let mut request = messages(3);
        let sampling = v1::SamplingParameters {
            stop: vec!["x".into(); 2],
            logit_bias: (0..4).map(|token| (token, 1.0)).collect(),
            stop_token_ids: vec![7; 100],
            ..Default::default()
        };
        request.sampling = Some(sampling);
        assert_eq!(count(GENERATE, &request.encode_to_vec()), Ok(3 + 2 + 4));
        let explain = v1::ExplainRequest { request: Some(request) };
        assert_eq!(count(EXPLAIN, &explain.encode_to_vec()), Ok(9));
        assert_eq!(count(GENERATE, &[]), Ok(0));
    }

    #[test]
    fn repeated_field_over_limit_is_named_even_in_several_parts() {
        let too_many = |field: &str| Err(WireError::TooMany { field: field.into(), most: MAX_ENTRIES });
        assert_eq!(count(GENERATE, &messages(MAX_ENTRIES + 1).encode_to_vec()), too_many("messages"));
        assert_eq!(count(GENERATE, &messages(MAX_ENTRIES).encode_to_vec()), Ok(MAX_ENTRIES));
        let half = messages(MAX_ENTRIES / 2 + 1).encode_to_vec();
        // Decoders join the two.
        assert_eq!(count(GENERATE, &[&half[..], &half[..]].concat()), too_many("messages"));
        let tools = v1::MessagesPrompt { tools: vec![String::new(); MAX_ENTRIES + 1], ..Default::default() };
        let tools = v1::GenerateRequest { prompt: Some(Prompt::Messages(tools)), ..Default::default() };
        assert_eq!(count(GENERATE, &tools.encode_to_vec()), too_many("tools"));
        let told = |logprobs: usize| {
            let prompt_logprobs = vec![v1::TokenLogprobs::default(); logprobs];
            v1::FirstToken { prompt_logprobs, ..Default::default() }
        };
        let event = |first: v1::FirstToken| {
            let event = Some(v1::prefill_event::Event::FirstToken(first));
            let event = Some(v1::node_event::Event::Prefill(v1::PrefillEvent { event, ..Default::default() }));
            v1::NodeEvent { event }.encode_to_vec()
        };
        let schema = Schema::new(FILE_DESCRIPTORS).unwrap();
        let session = schema.method("/baton.v1.Node/Session").unwrap().output;
        assert!(schema.count(session, &event(told(MAX_ENTRIES + 1))).is_ok(), "each token of a prompt may have some");
        assert!(schema.count(session, &event(told(MAX_LOGPROBS + 1))).is_err());
    }

    #[test]
    fn malformed_protobuf_message_is_refused() {
        // Truncated, a group, a length beyond the end, a varint without an end.
        for bytes in [&[0x08][..], &[0x0b, 0x0c], &[0x0a, 0x7f], &[0xff; 11]] {
            assert_eq!(count(GENERATE, bytes), Err(WireError::Malformed), "{bytes:?}");
        }
        // Unknown fields are skipped: 200 of each wire type.
        let unknown = [0xc0, 0x0c, 1, 0xc1, 0x0c, 0, 0, 0, 0, 0, 0, 0, 0, 0xc2, 0x0c, 1, 7, 0xc5, 0x0c, 0, 0, 0, 0];
        assert_eq!(count(GENERATE, &unknown), Ok(0));
        assert!(v1::GenerateRequest::decode(&unknown[..]).is_ok());
    }

    #[test]
    fn numbers_of_lists_are_counted_packed_or_not() {
        let ids = |ids: Vec<u32>| v1::GenerateRequest {
            prompt: Some(Prompt::TokenIds(v1::TokenIds { ids })),
            ..Default::default()
        };
        let numbers = |message: &[u8]| counts(GENERATE, message).unwrap().numbers;
        assert_eq!(numbers(&ids(vec![1; 1000]).encode_to_vec()), 1000);
        assert_eq!(numbers(&ids(vec![70_000; 1000]).encode_to_vec()), 3000, "at most");
        let unpacked = [&[0x22, 6][..], &[8, 1].repeat(3)].concat();
        assert_eq!(v1::GenerateRequest::decode(&unpacked[..]).unwrap(), ids(vec![1; 3]));
        assert_eq!(numbers(&unpacked), 3);
        let texts = counts(GENERATE, &v1::GenerateRequest { model: "abc".into(), ..ids(vec![1]) }.encode_to_vec());
        assert_eq!(texts, Ok(Counts { entries: 0, numbers: 1, text_bytes: 3 }));
    }

    #[test]
    fn schema_knows_methods_and_which_take_a_stream() {
        let schema = Schema::new(FILE_DESCRIPTORS).unwrap();
        let is_stream = |path: &str| schema.method(path).map(|method| method.is_stream);
        assert_eq!(is_stream("/baton.v1.Node/Session"), Some(true));
        assert_eq!(is_stream("/baton.v1.Inference/Abort"), Some(false));
        assert_eq!(is_stream("/grpc.health.v1.Health/Check"), None);
    }
}

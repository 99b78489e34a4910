//! Objects of a body. Lists are not taken for them, as serde would do. A field that is not known
//! ends the reading, unless it is null, or the object is open: then there is a warning.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{StrDeserializer, StringDeserializer};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, IntoDeserializer, MapAccess, Visitor};

use crate::field::cut;
use crate::warnings::{self, Step};

/// Declares objects. One with a field renamed to [`STRAY`] takes unknown fields, so that its kind
/// can be refused first. Reading of others ends at an unknown field.
macro_rules! objects {
    (@open $is_open:literal $($(#[$meta:meta])* $vis:vis struct $name:ident { $($body:tt)* })*) => {$(
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize)]
        #[serde(remote = "Self")]
        $vis struct $name { $($body)* }

        impl<'de> $crate::object::Object<'de> for $name {
            const IS_OPEN: bool = $is_open;

            fn read<D: serde::Deserializer<'de>>(fields: D) -> Result<Self, D::Error> {
                // What serde derived: it goes before the trait's.
                $name::deserialize(fields)
            }
        }

        impl $crate::object::Shape for $name {
            const SHAPE: &'static str = "an object";
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_map($crate::object::ObjectVisitor::new())
            }
        }
    )*};
    ($($objects:tt)*) => { $crate::object::objects! { @open false $($objects)* } };
}
pub(crate) use objects;

/// Declares open objects: messages, what they are made of, and tools. Clients of several APIs put
/// more into them than one API has.
macro_rules! open_objects {
    ($($objects:tt)*) => { $crate::object::objects! { @open true $($objects)* } };
}
pub(crate) use open_objects;

/// What a field takes, in words.
pub(crate) trait Shape {
    const SHAPE: &'static str;
}

/// The name of the field that gets a [`Stray`]: what a client gives by that name is not known
/// either.
pub(crate) const STRAY: &str = "?";

/// The first field that is not known, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Stray(pub(crate) Option<String>);

impl<'de> Deserialize<'de> for Stray {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|name| Self(Some(name)))
    }
}

/// What is read from fields alone.
pub(crate) trait Object<'de>: Sized {
    /// Whether a field that is not known is left out with a warning.
    const IS_OPEN: bool;

    fn read<D: Deserializer<'de>>(fields: D) -> Result<Self, D::Error>;
}

pub(crate) struct ObjectVisitor<T>(PhantomData<T>);

impl<T> ObjectVisitor<T> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<'de, T: Object<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
        T::read(Fields { fields, is_open: T::IS_OPEN })
    }
}

/// Fields for a struct.
struct Fields<A> {
    fields: A,
    is_open: bool,
}

impl<'de, A: MapAccess<'de>> Deserializer<'de> for Fields<A> {
    type Error = A::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, A::Error> {
        visitor.visit_map(self.fields)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let Self { fields, is_open } = self;
        visitor.visit_map(Known { fields, known, is_open, field: "", stray: None, tells_stray: false })
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// What the client of an unknown field may look for, to follow "this field is not known".
fn meant(name: &str, known: &[&str]) -> String {
    let elsewhere = ELSEWHERE.iter().find(|field| field.name == name && known.contains(&field.beside));
    if let Some(field) = elsewhere {
        return format!("; {}", field.hint);
    }
    let likeness = |known: &&&str| strsim::jaro_winkler(name, known);
    let nearest = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    nearest.filter(|nearest| likeness(nearest) > ALIKE).map(|it| format!("; did you mean {it}?")).unwrap_or_default()
}

/// A misspelt field is this like the known one (Jaro-Winkler). Few fields of other servers are.
const ALIKE: f64 = 0.9;

/// A field that clients look for in another place.
struct Elsewhere {
    name: &'static str,
    /// Objects that have this field are meant.
    beside: &'static str,
    hint: &'static str,
}

const ELSEWHERE: [Elsewhere; 13] = [
    Elsewhere { name: "max_completion_tokens", beside: "max_tokens", hint: "did you mean max_tokens?" },
    Elsewhere { name: "timeout_ms", beside: "baton", hint: "did you mean baton.timeout_ms?" },
    Elsewhere { name: "timeout", beside: "baton", hint: "baton.timeout_ms is, in milliseconds" },
    Elsewhere { name: "ttft_slo_ms", beside: "baton", hint: "did you mean baton.ttft_slo_ms?" },
    Elsewhere { name: "tbt_slo_ms", beside: "baton", hint: "did you mean baton.tbt_slo_ms?" },
    Elsewhere { name: "prompt_logprobs", beside: "echo", hint: "logprobs with echo gives those of the prompt" },
    Elsewhere { name: "n_predict", beside: "max_tokens", hint: "did you mean max_tokens?" },
    Elsewhere { name: "max_new_tokens", beside: "max_tokens", hint: "did you mean max_tokens?" },
    Elsewhere { name: "max_output_tokens", beside: "max_tokens", hint: "did you mean max_tokens?" },
    Elsewhere { name: "max_tokens", beside: "max_output_tokens", hint: "did you mean max_output_tokens?" },
    Elsewhere { name: "repeat_penalty", beside: "repetition_penalty", hint: "did you mean repetition_penalty?" },
    Elsewhere { name: "enable_thinking", beside: "chat_template_kwargs", hint: "chat_template_kwargs may have it" },
    Elsewhere {
        name: "thinking",
        beside: "chat_template_kwargs",
        hint: "chat_template_kwargs may have enable_thinking",
    },
];

/// Fields of bodies by which clients tell other servers where and how to run a request. The answer
/// is as good without them.
const HINTS: [&str; 18] = [
    // llama.cpp's.
    "cache_prompt",
    "id_slot",
    "return_progress",
    "timings_per_token",
    "reasoning_format",
    // vLLM's and SGLang's.
    "request_id",
    "rid",
    "separate_reasoning",
    "stream_reasoning",
    // Ollama's and LM Studio's.
    "keep_alive",
    "ttl",
    // OpenRouter's.
    "models",
    "plugins",
    "provider",
    "route",
    "transforms",
    "usage",
    "session_id",
];

/// Fields, of which those that are not known are kept from the struct.
struct Known<A> {
    fields: A,
    known: &'static [&'static str],
    is_open: bool,
    /// The one whose value is next.
    field: &'static str,
    stray: Option<String>,
    /// The next value is the name in `stray`.
    tells_stray: bool,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Known<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        while let Some(Name(name)) = self.fields.next_key()? {
            if let Some(known) = self.known.iter().find(|known| **known == name && name != STRAY) {
                self.field = known;
                let name: StrDeserializer<'_, A::Error> = known.into_deserializer();
                return seed.deserialize(name).map(Some);
            }
            // Null asks for nothing, whatever it is that newer clients have.
            let is_null = self.fields.next_value::<Option<IgnoredAny>>()?.is_none();
            let is_hint = HINTS.contains(&name.as_str()) && self.known.contains(&"model");
            if !is_null && (self.is_open || is_hint) {
                warnings::warn_field(&name, "is not known, and was left out");
                continue;
            }
            if !is_null && !self.known.contains(&STRAY) {
                let meant = meant(&name, self.known);
                return Err(A::Error::custom(format_args!("unknown field `{name}`{meant}")));
            }
            if !is_null {
                self.stray.get_or_insert(name);
            }
        }
        if self.stray.is_none() || self.tells_stray {
            return Ok(None);
        }
        self.tells_stray = true;
        let name: StrDeserializer<'_, A::Error> = STRAY.into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        match self.stray.clone().filter(|_| self.tells_stray) {
            None => warnings::inside(Step::Field(self.field), || self.fields.next_value_seed(seed)),
            Some(stray) => {
                let stray: StringDeserializer<A::Error> = stray.into_deserializer();
                seed.deserialize(stray)
            }
        }
    }
}

/// The name of a field, as far as an error tells it.
struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Name, E> {
                Ok(Name(cut(name).to_owned()))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// The fields that an object takes: those that are known and not refused.
#[cfg(test)]
pub(crate) fn taken<T: for<'de> Object<'de> + serde::de::DeserializeOwned + fmt::Debug>() -> Vec<&'static str> {
    let is_taken = |field: &&str| match crate::read::<T>(format!(r#"{{"{field}": 1}}"#).as_bytes()) {
        Ok(_) => true,
        Err(error) => !error.problem.starts_with("is not served here"),
    };
    let known = tests::FieldNames::of::<T>();
    known.iter().copied().filter(|field| *field != STRAY).filter(is_taken).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Keeps the names of the fields that a struct asks for, and reads nothing.
    #[derive(Clone, Copy)]
    pub(super) struct FieldNames<'a>(&'a Cell<&'static [&'static str]>);

    impl FieldNames<'_> {
        pub(super) fn of<T: for<'de> Object<'de> + fmt::Debug>() -> &'static [&'static str] {
            let names = Cell::new([].as_slice());
            T::read(FieldNames(&names)).expect_err("nothing is read");
            names.get()
        }
    }

    impl<'de> Deserializer<'de> for FieldNames<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(Self::Error::custom("no struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            names: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Self::Error> {
            self.0.set(names);
            Err(Self::Error::custom("nothing is read"))
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    objects! {
        #[allow(dead_code)]
        struct Strict {
            a: Option<u32>,
            #[serde(default)]
            no: crate::field::Refused,
        }

        struct Lenient {
            #[serde(default, rename = "?")]
            stray: Stray,
        }
    }

    open_objects! {
        #[allow(dead_code)]
        struct Open {
            a: Option<u32>,
            inner: Option<crate::field::AtMost<Open, 9>>,
        }
    }

    #[test]
    fn unknown_field_is_told_with_what_may_be_meant() {
        let known = ["max_tokens", "min_tokens", "logprobs", "top_logprobs", "prompt", "echo", "baton"];
        assert_eq!(meant("max_token", &known), "; did you mean max_tokens?");
        assert_eq!(meant("timeout_ms", &known), "; did you mean baton.timeout_ms?");
        assert_eq!(meant("prompt_logprobs", &known), "; logprobs with echo gives those of the prompt");
        assert_eq!(meant("prompt_logprobs", &["prompt", "top_logprobs"]), "");
        assert_eq!(meant("colour", &known), "");
    }

    #[test]
    fn unknown_fields_are_refused_or_reported() {
        assert_eq!(taken::<Strict>(), ["a"]);
        assert!(serde_json::from_str::<Strict>(r#"{"a": 1, "b": null, "?": null}"#).is_ok());
        assert!(serde_json::from_str::<Strict>(r#"{"a": 1, "b": 2}"#).is_err());
        assert!(serde_json::from_str::<Strict>("[1]").is_err());
        let lenient: Lenient = serde_json::from_str(r#"{"z": null, "b": [1], "a": 2}"#).expect("an object");
        assert_eq!(lenient.stray.0.as_deref(), Some("b"));
        let lenient: Lenient = serde_json::from_str(r#"{"?": 1}"#).expect("an object");
        assert_eq!(lenient.stray.0.as_deref(), Some("?"));
        assert_eq!(serde_json::from_str::<Lenient>("{}").expect("an object").stray.0, None);
    }

    #[test]
    fn unknown_field_of_an_open_object_is_a_warning_with_its_path() {
        let read = |json: &str| warnings::collect(|| serde_json::from_str::<Open>(json).map(drop));
        let (read, warned) = read(r#"{"b": [1], "c": null, "inner": [{}, {"a": 1, "ho\nt": {"x": 1}}]}"#);
        assert!(read.is_ok());
        assert_eq!(warned.line(), "b: is not known, and was left out; inner[1].ho?t: is not known, and was left out");
    }
}

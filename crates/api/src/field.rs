//! Kinds of fields.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

pub(crate) use crate::object::{Shape, Stray, objects, open_objects};
use crate::warnings::{self, Step};

/// The beginning of a text of the client's, for an error.
pub(crate) fn cut(text: &str) -> &str {
    const MOST: usize = 64;
    text.char_indices().nth(MOST).map_or(text, |(end, _)| &text[..end])
}

/// A field that says nothing here, whatever it says.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ignored;

impl<'de> Deserialize<'de> for Ignored {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// A field that asks for what is not done here, and whose answer is as good without; null asks for
/// nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LeftOut;

impl<'de> Deserialize<'de> for LeftOut {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if Option::<IgnoredAny>::deserialize(deserializer)?.is_some() {
            warnings::warn_object("is not done here");
        }
        Ok(Self)
    }
}

/// A field of what is not served here; null asks for nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Refused;

impl<'de> Deserialize<'de> for Refused {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        refused(deserializer, "is not served here")
    }
}

fn refused<'de, D: Deserializer<'de>>(deserializer: D, problem: &str) -> Result<Refused, D::Error> {
    match Option::<IgnoredAny>::deserialize(deserializer)? {
        None => Ok(Refused),
        Some(_) => Err(D::Error::custom(problem)),
    }
}

/// A field that has another name now.
pub(crate) fn structured_outputs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Refused, D::Error> {
    refused(deserializer, "is not served here: structured_outputs is")
}

/// Takes the value that asks for nothing; others ask for what is not served here.
fn only<'de, D, T>(deserializer: D, neutral: T) -> Result<Ignored, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + PartialEq + fmt::Debug,
{
    match Option::<T>::deserialize(deserializer)? {
        Some(given) if given != neutral => {
            Err(D::Error::custom(format_args!("{given:?}, but only {neutral:?} is served here")))
        }
        _ => Ok(Ignored),
    }
}

pub(crate) fn only_true<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Ignored, D::Error> {
    only(deserializer, true)
}

pub(crate) fn only_false<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Ignored, D::Error> {
    only(deserializer, false)
}

pub(crate) fn only_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Ignored, D::Error> {
    only(deserializer, 1.0)
}

/// An integer, or none. Clients in languages that have one kind of number write 5 as `5.0`.
pub(crate) fn integer<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    struct Integer<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Integer<T> {
        type Value = Option<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an integer")
        }

        fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
            T::deserialize(number.into_deserializer()).map(Some)
        }

        fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
            T::deserialize(number.into_deserializer()).map(Some)
        }

        fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
            // Beyond that, several integers are the same number.
            const MOST: f64 = 9_007_199_254_740_992.0;
            if number.fract() == 0.0 && number.abs() < MOST {
                return self.visit_i64(number as i64);
            }
            Err(E::custom(format_args!("{number:?}, but must be an integer")))
        }
    }
    deserializer.deserialize_any(Integer(PhantomData))
}

/// A number of something, or none: from `LEAST` to `MOST`. If `MOST` is that of `u32`, larger
/// numbers become it.
pub(crate) fn count<'de, D: Deserializer<'de>, const LEAST: u32, const MOST: u32>(
    deserializer: D,
) -> Result<Option<u32>, D::Error> {
    let Some(given) = integer::<D, i128>(deserializer)? else { return Ok(None) };
    match u32::try_from(given) {
        Ok(count) if (LEAST..=MOST).contains(&count) => Ok(Some(count)),
        _ if MOST == u32::MAX && given > 0 => Ok(Some(MOST)),
        _ if MOST == u32::MAX => Err(D::Error::custom(format_args!("{given}, but must be at least {LEAST}"))),
        _ => Err(D::Error::custom(format_args!("{given}, but must be from {LEAST} to {MOST}"))),
    }
}

/// At most `MOST` of them.
#[derive(Debug, Clone)]
pub(crate) struct AtMost<T, const MOST: usize>(pub(crate) Vec<T>);

impl<T, const MOST: usize> Default for AtMost<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MOST: usize> Shape for AtMost<T, MOST> {
    const SHAPE: &'static str = "a list";
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for AtMost<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const MOST: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for List<T, MOST> {
            type Value = AtMost<T, MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = warnings::inside(Step::Index(list.len()), || items.next_element())? {
                    if list.len() == MOST {
                        return Err(A::Error::custom(format_args!("at most {MOST} are taken")));
                    }
                    list.push(item);
                }
                Ok(AtMost(list))
            }
        }
        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// An object of at most `MOST` fields with names of the client's.
#[derive(Debug, Clone)]
pub(crate) struct Entries<T, const MOST: usize>(pub(crate) Vec<(String, T)>);

impl<T, const MOST: usize> Default for Entries<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Entries<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T, const MOST: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Fields<T, MOST> {
            type Value = Entries<T, MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = fields.next_entry()? {
                    if entries.len() == MOST {
                        return Err(A::Error::custom(format_args!("at most {MOST} are taken")));
                    }
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// One text, or a list of at most `MOST`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Texts<const MOST: usize>(pub(crate) Vec<String>);

impl<'de, const MOST: usize> Deserialize<'de> for Texts<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany<const MOST: usize>;
        impl<'de, const MOST: usize> Visitor<'de> for OneOrMany<MOST> {
            type Value = Texts<MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Ok(Texts::default())
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Texts(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
                let list = AtMost::<String, MOST>::deserialize(SeqAccessDeserializer::new(items))?;
                Ok(Texts(list.0))
            }
        }
        deserializer.deserialize_any(OneOrMany)
    }
}

/// A text, or something with parts.
#[derive(Debug)]
pub(crate) enum TextOr<T> {
    Text(String),
    Parts(T),
}

impl<'de, T: Deserialize<'de> + Shape> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + Shape> Visitor<'de> for Either<T> {
            type Value = TextOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a text or {}", T::SHAPE)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
                T::deserialize(SeqAccessDeserializer::new(items)).map(TextOr::Parts)
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(TextOr::Parts)
            }
        }
        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// A text, something with parts, or an object that says nothing here.
#[derive(Debug)]
pub(crate) enum Content<T> {
    Text(String),
    Parts(T),
    Object,
}

impl<'de, T: Deserialize<'de> + Shape> Deserialize<'de> for Content<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + Shape> Visitor<'de> for Any<T> {
            type Value = Content<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a text or {}", T::SHAPE)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
                T::deserialize(SeqAccessDeserializer::new(items)).map(Content::Parts)
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Self::Value, A::Error> {
                IgnoredAny.visit_map(fields).map(|_| Content::Object)
            }
        }
        deserializer.deserialize_any(Any(PhantomData))
    }
}

/// Most bytes of a schema.
pub(crate) const MAX_SCHEMA_BYTES: usize = 64 << 10;
/// Most bytes of a document, and of what a tool was given.
pub(crate) const MAX_CONTENT_BYTES: usize = 4 << 20;
/// Deepest that JSON may be: who reads it has a limit, too.
const MAX_JSON_DEPTH: usize = 64;

/// JSON of at most `BYTES` that is passed on as it is written, and is never a tree here.
#[derive(Debug)]
pub(crate) struct Json<const BYTES: usize>(pub(crate) Box<RawValue>);

impl<'de, const BYTES: usize> Deserialize<'de> for Json<BYTES> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        let bytes = raw.get().len();
        if bytes > BYTES {
            return Err(D::Error::custom(format_args!("{bytes} bytes, but at most {BYTES} are taken")));
        }
        if depth(raw.get()) > MAX_JSON_DEPTH {
            return Err(D::Error::custom(format_args!("is more than {MAX_JSON_DEPTH} levels deep")));
        }
        Ok(Self(raw))
    }
}

/// Such JSON that is an object.
#[derive(Debug)]
pub(crate) struct JsonObject<const BYTES: usize>(pub(crate) Box<RawValue>);

impl<'de, const BYTES: usize> Deserialize<'de> for JsonObject<BYTES> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Json(raw) = Json::<BYTES>::deserialize(deserializer)?;
        if !raw.get().starts_with('{') {
            return Err(D::Error::custom("is no object"));
        }
        Ok(Self(raw))
    }
}

/// Reads an object, or an empty list: some languages write an empty object so.
pub(crate) fn object_or_empty_list<'de, D: Deserializer<'de>, const BYTES: usize>(
    deserializer: D,
) -> Result<Option<JsonObject<BYTES>>, D::Error> {
    let Some(Json(json)) = Option::<Json<BYTES>>::deserialize(deserializer)? else { return Ok(None) };
    let text = if is_empty_list(json.get()) { "{}" } else { json.get() };
    JsonObject::deserialize(&mut serde_json::Deserializer::from_str(text)).map(Some).map_err(D::Error::custom)
}

pub(crate) fn is_empty_list(json: &str) -> bool {
    json.strip_prefix('[').is_some_and(|rest| rest.trim_ascii_start() == "]")
}

/// How many lists and objects lie in one another.
fn depth(json: &str) -> usize {
    let mut deepest = 0;
    let mut depth = 0_usize;
    let mut bytes = json.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => {
                while let Some(byte) = bytes.next().filter(|&byte| byte != b'"') {
                    if byte == b'\\' {
                        bytes.next();
                    }
                }
            }
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth -= 1,
            _ => {}
        }
    }
    deepest
}

/// What `null` and nothing say alike.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_depth_ignores_brackets_in_strings() {
        assert_eq!(depth("1"), 0);
        assert_eq!(depth(r#"{"a[[\"[": [1, {"b": "}"}], "c": []}"#), 3);
    }

    #[test]
    fn json_over_byte_or_depth_limit_is_refused() {
        let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(serde_json::from_str::<Json<999>>(&nested(MAX_JSON_DEPTH)).is_ok());
        assert!(serde_json::from_str::<Json<999>>(&nested(MAX_JSON_DEPTH + 1)).is_err());
        assert!(serde_json::from_str::<Json<999>>(&format!("\"{}\"", "x".repeat(998))).is_err());
        assert!(serde_json::from_str::<JsonObject<999>>("[]").is_err());
    }

    #[test]
    fn long_text_is_truncated_between_characters() {
        assert_eq!(cut(&"ä".repeat(99)), "ä".repeat(64));
        assert_eq!(cut("ab"), "ab");
    }
}

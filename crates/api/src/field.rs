//! Kinds of fields.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

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

/// A field of what is not served here; null asks for nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Refused;

impl<'de> Deserialize<'de> for Refused {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Option::<IgnoredAny>::deserialize(deserializer)? {
            None => Ok(Self),
            Some(_) => Err(D::Error::custom("is not served here")),
        }
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
                while let Some(item) = items.next_element()? {
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
                let list = AtMost::<String, MOST>::deserialize(serde::de::value::SeqAccessDeserializer::new(items))?;
                Ok(Texts(list.0))
            }
        }
        deserializer.deserialize_any(OneOrMany)
    }
}

/// What `null` and nothing say alike.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

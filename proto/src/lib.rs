//! The wire: generated types, and the only conversions between wire and domain.

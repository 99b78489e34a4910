//! The front door: tokenizes, places, admits, relays.

//! What both node kinds share: the session with conductors, the engine thread, pushes, drain.

//! Clock, settings, telemetry, supervised tasks and shutdown phases.

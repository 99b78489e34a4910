//! What fuzzing drives, and nothing else should: settings that are set at run time.

use std::sync::Arc;

use baton_membership::SharedSettings;
use baton_runtime::ManualClock;
use baton_runtime::settings::Loaded;

use crate::config::Settings;
use crate::run_time_settings::RunTimeSettings;

/// Settings of a conductor, while it runs.
pub struct RunTime(RunTimeSettings);

impl Default for RunTime {
    fn default() -> Self {
        Self(RunTimeSettings::new(Settings::default().into(), None, Arc::new(ManualClock::default())))
    }
}

impl RunTime {
    /// The next version of what is set, as `baton settings set` makes it.
    ///
    /// # Errors
    /// What is wrong, as the operator is told.
    pub fn next(&self, before: &SharedSettings, change: &[(String, String)]) -> Result<SharedSettings, String> {
        self.0.next(before, change, "fuzz", 7).map_err(|error| error.to_string())
    }

    /// All settings with what etcd says is set, as each conductor checks it before it goes by it.
    ///
    /// # Errors
    /// What is wrong, as the log says.
    pub fn with(&self, shared: &SharedSettings) -> Result<Loaded<Settings>, String> {
        self.0.with(shared).map(|(settings, _)| settings).map_err(|error| error.to_string())
    }
}

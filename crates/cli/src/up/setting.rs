//! `--set ROLE.KEY=VALUE`: a setting of the conductors or the nodes, passed on as their flag.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;

use baton_runtime::settings::flag_name;

use super::plan::{Role, Spec};
use crate::error::CliError;

const FLAG: &str = "--set";
/// Keys are meant for one another from this likeness on (Jaro-Winkler), which clap has, too.
const ALIKE: f64 = 0.8;
/// Settings in which nodes must agree with their conductor, which refuses other ones.
const SHARED: [&str; 3] = ["block_tokens", "kv_dtype", "served_model_name"];

/// A setting of all processes of some roles. They check the key and the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleSetting {
    roles: &'static [Role],
    /// `ROLE.KEY`, as it was given.
    name: String,
    key: String,
    value: String,
}

/// An item of `--set` that has another form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected ROLE.KEY=VALUE, as in conductor.max_wait_ms=5000; ROLE is conductor, prefill, decode or node (prefill \
     and decode)"
)]
pub struct NotASetting;

impl RoleSetting {
    /// Whether it sets this key of this role.
    pub fn sets(&self, role: Role, key: &str) -> bool {
        self.roles.contains(&role) && self.key == key
    }
}

impl FromStr for RoleSetting {
    type Err = NotASetting;

    fn from_str(text: &str) -> Result<Self, NotASetting> {
        let (name, value) = text.split_once('=').ok_or(NotASetting)?;
        let (role, key) = name.split_once('.').ok_or(NotASetting)?;
        let roles: &[Role] = match role {
            "conductor" => &[Role::Conductor],
            "prefill" => &[Role::Prefill],
            "decode" => &[Role::Decode],
            "node" if SHARED.contains(&key) => &[Role::Conductor, Role::Prefill, Role::Decode],
            "node" => &[Role::Prefill, Role::Decode],
            _ => return Err(NotASetting),
        };
        let is_key_letter = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
        if key.is_empty() || !key.chars().all(is_key_letter) {
            return Err(NotASetting);
        }
        Ok(Self { roles, name: name.to_owned(), key: key.to_owned(), value: value.to_owned() })
    }
}

/// Adds the settings of its role to the arguments of a process. The last value of a key counts.
///
/// # Errors
/// The process has the flag already: it would say that it was given twice.
pub fn add_settings(spec: &mut Spec, settings: &[RoleSetting]) -> Result<(), CliError> {
    let own = spec.arguments();
    let of_role = settings.iter().filter(|setting| setting.roles.contains(&spec.role));
    let values: BTreeMap<_, _> = of_role.map(|setting| (&setting.key, &setting.value)).collect();
    for (key, value) in values {
        let flag = flag_name(key);
        if own.iter().any(|arg| *arg == *flag) {
            let problem = format!("{}.{key}: `baton up` gives {flag} to this role itself", spec.role.as_str());
            return Err(CliError::invalid(FLAG, problem));
        }
        spec.args.push(format!("{flag}={value}").into());
    }
    Ok(())
}

/// Checks that a role has the keys of its settings, before any process starts: the role itself
/// would say so with a usage of all its flags.
///
/// # Errors
/// It does not have one of them.
pub fn check_keys(role: Role, program: &Path, settings: &[RoleSetting]) -> Result<(), CliError> {
    let of_role: Vec<_> = settings.iter().filter(|setting| setting.roles.contains(&role)).collect();
    if of_role.is_empty() {
        return Ok(());
    }
    let known = keys_of(program);
    match of_role.iter().find(|setting| !known.is_empty() && !known.contains(&setting.key)) {
        Some(unknown) => Err(CliError::invalid(FLAG, unknown_key(unknown, role, &known))),
        None => Ok(()),
    }
}

/// The keys of a role, as its program prints them; none if it does not.
fn keys_of(program: &Path) -> Vec<String> {
    let printed = Command::new(program).arg("--print-config").stdin(Stdio::null()).stderr(Stdio::null()).output();
    match printed {
        Ok(output) if output.status.success() => keys_in(&String::from_utf8_lossy(&output.stdout)),
        _ => Vec::new(),
    }
}

/// Of lines `KEY = VALUE`, and `# KEY is not set`.
fn keys_in(printed: &str) -> Vec<String> {
    let first_word = |line: &str| line.trim_start_matches("# ").split(' ').next().map(ToOwned::to_owned);
    printed.lines().filter_map(first_word).collect()
}

fn unknown_key(setting: &RoleSetting, role: Role, known: &[String]) -> String {
    let RoleSetting { name, key, .. } = setting;
    let role = role.as_str();
    let nearest = nearest(key, known).map(|nearest| format!("; did you mean {nearest}?")).unwrap_or_default();
    format!(
        "{name}: there is no such setting of {role}{nearest} (baton-{role} --help and docs/configuration.md list all)"
    )
}

/// The key that a mistyped one is most like.
fn nearest<'a>(key: &str, known: &'a [String]) -> Option<&'a String> {
    let likeness = |known: &String| strsim::jaro_winkler(key, known);
    let nearest = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    Some(nearest).filter(|nearest| likeness(nearest) > ALIKE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(role: Role, settings: &[&str]) -> Result<String, CliError> {
        let listen = vec![("--listen", "127.0.0.1:0".to_owned())];
        let mut spec = Spec { name: "x".to_owned(), role, program: "x".into(), args: vec!["--json".into()], listen };
        let settings: Vec<RoleSetting> = settings.iter().map(|text| text.parse().unwrap()).collect();
        add_settings(&mut spec, &settings)?;
        Ok(spec.args.join(" ".as_ref()).into_string().unwrap())
    }

    #[test]
    fn setting_with_another_form_is_refused() {
        for wrong in ["", "a=1", "conductor.a", "conductor.=1", "conductor.a-b=1", "etcd.a=1"] {
            assert_eq!(wrong.parse::<RoleSetting>(), Err(NotASetting), "{wrong}");
        }
    }

    #[test]
    fn last_value_of_a_key_reaches_its_roles_as_a_flag() {
        let settings = ["node.cache_blocks=7", "decode.cache_blocks=9", "conductor.cors_origins=http://a.b=c"];
        assert_eq!(given(Role::Prefill, &settings).unwrap(), "--json --cache-blocks=7");
        assert_eq!(given(Role::Decode, &settings).unwrap(), "--json --cache-blocks=9");
        assert_eq!(given(Role::Conductor, &settings).unwrap(), "--json --cors-origins=http://a.b=c");
    }

    #[test]
    fn setting_that_nodes_share_with_the_conductor_reaches_all() {
        for role in [Role::Conductor, Role::Prefill, Role::Decode] {
            assert_eq!(given(role, &["node.kv_dtype=int8"]).unwrap(), "--json --kv-dtype=int8");
        }
    }

    #[test]
    fn unknown_key_is_told_with_the_nearest_one() {
        let known =
            keys_in("max_wait_ms = 30000      # default\n# model is not set    # default\nmax_running = 4 # x\n");
        assert_eq!(known, ["max_wait_ms", "model", "max_running"]);
        let told = |text: &str| unknown_key(&text.parse().unwrap(), Role::Conductor, &known);
        let list = "(baton-conductor --help and docs/configuration.md list all)";
        assert_eq!(
            told("conductor.max_wait=1"),
            format!("conductor.max_wait: there is no such setting of conductor; did you mean max_wait_ms? {list}")
        );
        assert_eq!(told("node.colour=1"), format!("node.colour: there is no such setting of conductor {list}"));
    }

    #[test]
    fn setting_that_up_gives_itself_is_refused() {
        let error = given(Role::Decode, &["node.listen=h:1"]).unwrap_err().to_string();
        assert_eq!(error, "--set: decode.listen: `baton up` gives --listen to this role itself");
        assert!(given(Role::Conductor, &["node.listen=h:1"]).is_ok());
    }
}

//! `--set ROLE.KEY=VALUE`: a setting of the conductors or the nodes, passed on as their flag.

use std::collections::BTreeMap;
use std::str::FromStr;

use baton_runtime::settings::flag_name;

use super::plan::{Role, Spec};
use crate::error::CliError;

const FLAG: &str = "--set";
/// Settings in which nodes must agree with their conductor, which refuses other ones.
const SHARED: [&str; 3] = ["block_tokens", "kv_dtype", "model_name"];

/// A setting of all processes of some roles. They check the key and the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleSetting {
    roles: &'static [Role],
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
        Ok(Self { roles, key: key.to_owned(), value: value.to_owned() })
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
    fn setting_that_up_gives_itself_is_refused() {
        let error = given(Role::Decode, &["node.listen=h:1"]).unwrap_err().to_string();
        assert_eq!(error, "--set: decode.listen: `baton up` gives --listen to this role itself");
        assert!(given(Role::Conductor, &["node.listen=h:1"]).is_ok());
    }
}

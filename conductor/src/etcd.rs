//! From the settings to etcd.

use baton_membership::{CertifiedKey, Etcd, EtcdError, EtcdFile, Tls, User};
use baton_runtime::settings::BadSetting;

use crate::config::Settings;

const HTTPS: &str = "https://";
const HTTP: &str = "http://";

/// Where etcd is and what it is asked with, checked: each file can be used now. `None`: this
/// conductor is alone.
///
/// # Errors
/// A setting is wrong, or a file is.
pub fn of(settings: &Settings) -> Result<Option<Etcd>, BadSetting> {
    if settings.etcd.is_empty() {
        return unused(settings).map(|()| None);
    }
    let tls = tls(settings)?;
    // A member that is asked in another way than the others is a mistake that would show only at
    // times.
    let (wrong, form) = match tls {
        Some(_) => (HTTP, "without TLS, but etcd_ca is set: must be host:port, or https://host:port"),
        None => {
            (HTTPS, "with TLS, but etcd_ca is not set: it names the authorities that its certificate must come from")
        }
    };
    if let Some(member) = settings.etcd.iter().find(|member| member.starts_with(wrong)) {
        return Err(BadSetting::invalid("etcd", format!("{member} is {form}")));
    }
    let prefix = prefix(&settings.etcd_prefix)?.to_owned();
    let etcd = Etcd { endpoints: settings.etcd.clone(), prefix, tls, user: user(settings)? };
    etcd.check().map_err(|error| match error {
        EtcdError::File { file, .. } => BadSetting::invalid(key(file), error.to_string()),
        error => BadSetting::invalid("etcd", error.to_string()),
    })?;
    if let (Some(user), None) = (&etcd.user, &etcd.tls) {
        tracing::warn!(user = user.name, "etcd gets the password without TLS: etcd_ca is not set");
    }
    Ok(Some(etcd))
}

fn prefix(prefix: &str) -> Result<&str, BadSetting> {
    let is_taken = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '/' | '-' | '_' | '.');
    match prefix.len() {
        1..=256 if prefix.chars().all(is_taken) && !prefix.ends_with('/') => Ok(prefix),
        _ => {
            let problem = format!("'{prefix}', but must be 1 to 256 letters, digits and /-_. that do not end with /");
            Err(BadSetting::invalid("etcd_prefix", problem))
        }
    }
}

/// What is for etcd makes no sense without it.
fn unused(settings: &Settings) -> Result<(), BadSetting> {
    let given = [
        ("etcd_ca", settings.etcd_ca.is_some()),
        ("etcd_cert", settings.etcd_cert.is_some()),
        ("etcd_key", settings.etcd_key.is_some()),
        ("etcd_user", settings.etcd_user.is_some()),
        ("etcd_password_file", settings.etcd_password_file.is_some()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => Err(BadSetting::invalid(key, "set, but etcd is not")),
        None => Ok(()),
    }
}

fn tls(settings: &Settings) -> Result<Option<Tls>, BadSetting> {
    let identity = match (&settings.etcd_cert, &settings.etcd_key) {
        (Some(certificate), Some(key)) => Some(CertifiedKey { certificate: certificate.clone(), key: key.clone() }),
        (None, None) => None,
        (Some(_), None) => return Err(BadSetting::invalid("etcd_cert", "set, but etcd_key is not")),
        (None, Some(_)) => return Err(BadSetting::invalid("etcd_key", "set, but etcd_cert is not")),
    };
    match (&settings.etcd_ca, identity) {
        (Some(authorities), identity) => Ok(Some(Tls { authorities: authorities.clone(), identity })),
        (None, Some(_)) => Err(BadSetting::invalid("etcd_cert", "set, but etcd_ca is not: etcd is asked without TLS")),
        (None, None) => Ok(None),
    }
}

fn user(settings: &Settings) -> Result<Option<User>, BadSetting> {
    match (&settings.etcd_user, &settings.etcd_password_file) {
        (Some(name), Some(password)) if !name.is_empty() => {
            Ok(Some(User { name: name.clone(), password: password.clone() }))
        }
        (Some(_), Some(_)) => Err(BadSetting::invalid("etcd_user", "'', but must be a name")),
        (None, None) => Ok(None),
        (Some(_), None) => Err(BadSetting::invalid("etcd_user", "set, but etcd_password_file is not")),
        (None, Some(_)) => Err(BadSetting::invalid("etcd_password_file", "set, but etcd_user is not")),
    }
}

const fn key(file: EtcdFile) -> &'static str {
    match file {
        EtcdFile::Authorities => "etcd_ca",
        EtcdFile::Certificate => "etcd_cert",
        EtcdFile::Key => "etcd_key",
        EtcdFile::Password => "etcd_password_file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(given: &[(&str, &str)]) -> Settings {
        let mut settings = Settings { etcd: vec!["10.0.0.9:2379".into()], ..Settings::default() };
        for (key, value) in given {
            let file = Some((*value).into());
            match *key {
                "etcd" => settings.etcd = vec![(*value).into()],
                "etcd_ca" => settings.etcd_ca = file,
                "etcd_cert" => settings.etcd_cert = file,
                "etcd_key" => settings.etcd_key = file,
                "etcd_user" => settings.etcd_user = Some((*value).into()),
                _ => settings.etcd_password_file = file,
            }
        }
        settings
    }

    #[test]
    fn invalid_etcd_settings_are_named_before_connecting() {
        let etcd = of(&settings(&[("etcd", "http://10.0.0.9:2379")])).unwrap().unwrap();
        assert!(etcd.tls.is_none() && etcd.user.is_none());
        for (given, key, problem) in [
            (&[("etcd_cert", "/c")][..], "etcd_cert", "etcd_key is not"),
            (&[("etcd_key", "/k")], "etcd_key", "etcd_cert is not"),
            (&[("etcd_cert", "/c"), ("etcd_key", "/k")], "etcd_cert", "etcd_ca is not"),
            (&[("etcd_ca", "/no/such")], "etcd_ca", "/no/such cannot be read"),
            (&[("etcd_ca", "/c"), ("etcd", "http://h:1")], "etcd", "http://h:1 is without TLS"),
            (&[("etcd", "https://h:1")], "etcd", "https://h:1 is with TLS"),
            (&[("etcd_user", "baton")], "etcd_user", "etcd_password_file is not"),
            (&[("etcd_password_file", "/p")], "etcd_password_file", "etcd_user is not"),
            (&[("etcd_user", ""), ("etcd_password_file", "/p")], "etcd_user", "must be a name"),
            (&[("etcd_user", "a"), ("etcd_password_file", "/no/such")], "etcd_password_file", "/no/such cannot be"),
        ] {
            let error = of(&settings(given)).unwrap_err();
            assert!(error.key == key && error.problem.contains(problem), "{given:?}: {error}");
        }
        let alone = Settings { etcd: Vec::new(), ..settings(&[("etcd_ca", "/c")]) };
        assert_eq!(of(&alone).unwrap_err().to_string(), "etcd_ca: set, but etcd is not");
        assert_eq!(of(&Settings::default()).unwrap(), None);
    }

    #[test]
    fn prefix_of_etcd_keys_must_be_a_path() {
        assert_eq!(prefix("/baton/blue").unwrap(), "/baton/blue");
        for wrong in ["", "/baton/", "/ba ton"] {
            assert!(prefix(wrong).unwrap_err().to_string().contains("etcd_prefix"), "{wrong}");
        }
    }
}

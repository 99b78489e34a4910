//! The connection to etcd: where it is, what proves who it is, and who asks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_runtime::{Clock, error_chain, within};
use etcd_client::{Client, ConnectOptions, TlsOptions};
use tonic::transport::{Certificate, Endpoint, Identity};

use crate::EtcdError;

/// How long etcd may take to answer.
const ANSWER: Duration = Duration::from_secs(1);
/// Certificates, keys and passwords are smaller.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Where etcd is, which of its keys are ours, and what it asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Etcd {
    /// `host:port` of each of its members, or URLs.
    pub endpoints: Vec<String>,
    /// All keys begin so: clusters that share an etcd have one each.
    pub prefix: String,
    /// Without it, nothing is encrypted.
    pub tls: Option<Tls>,
    /// Who asks, if etcd knows users.
    pub user: Option<User>,
}

/// Files in PEM, read at each connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The authorities that etcd's certificate must come from.
    pub authorities: PathBuf,
    /// What proves who asks.
    pub identity: Option<CertifiedKey>,
}

/// A certificate and its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertifiedKey {
    /// The certificate, and those between it and its authority.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// One of etcd's users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Its name.
    pub name: String,
    /// A file with its password, read at each connect. A newline at its end is not part of it.
    pub password: PathBuf,
}

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EtcdFile {
    /// [`Tls::authorities`].
    Authorities,
    /// [`CertifiedKey::certificate`].
    Certificate,
    /// [`CertifiedKey::key`].
    Key,
    /// Of [`User`].
    Password,
}

impl Etcd {
    /// One that asks for neither TLS nor a user.
    pub fn new(endpoints: Vec<String>, prefix: impl Into<String>) -> Self {
        Self { endpoints, prefix: prefix.into(), tls: None, user: None }
    }

    /// Reads all files, as each connect does.
    ///
    /// # Errors
    /// One cannot be read, or is not what it should be.
    pub fn check(&self) -> Result<(), EtcdError> {
        self.options().map(drop)
    }

    /// Of any number: they go around.
    pub(crate) fn member(&self, member: usize) -> &str {
        let of = self.endpoints.len().max(1);
        self.endpoints.get(member % of).map_or("", String::as_str)
    }

    fn options(&self) -> Result<ConnectOptions, EtcdError> {
        // A token that expires is asked for anew, and the call is made again.
        let mut options = ConnectOptions::new().with_connect_timeout(ANSWER).with_auto_token_refresh(true);
        if let Some(tls) = &self.tls {
            options = options.with_tls(tls.options()?);
        }
        if let Some(user) = &self.user {
            options = options.with_user(&user.name, user.password()?);
        }
        Ok(options)
    }
}

impl Tls {
    fn options(&self) -> Result<TlsOptions, EtcdError> {
        // A file without any would be taken, and nothing would be trusted.
        let authorities = pem(EtcdFile::Authorities, &self.authorities, "CERTIFICATE-----")?;
        let mut options = TlsOptions::new().ca_certificate(Certificate::from_pem(authorities));
        is_taken(&options).map_err(|problem| bad(EtcdFile::Authorities, &self.authorities, problem))?;
        if let Some(CertifiedKey { certificate, key }) = &self.identity {
            let certificate = pem(EtcdFile::Certificate, certificate, "CERTIFICATE-----")?;
            options = options.identity(Identity::from_pem(certificate, pem(EtcdFile::Key, key, "PRIVATE KEY-----")?));
            is_taken(&options)
                .map_err(|problem| bad(EtcdFile::Key, key, format!("with its certificate: {problem}")))?;
        }
        Ok(options)
    }
}

impl User {
    fn password(&self) -> Result<String, EtcdError> {
        let text = read(EtcdFile::Password, &self.password)?;
        let password = text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
        if password.is_empty() {
            Err(bad(EtcdFile::Password, &self.password, "is empty, but must be a password"))
        } else {
            Ok(password.to_owned())
        }
    }
}

/// As each endpoint will take it.
fn is_taken(options: &TlsOptions) -> Result<(), String> {
    let endpoint = Endpoint::from_static("https://etcd").tls_config(options.clone());
    endpoint.map(drop).map_err(|error| error_chain(&error))
}

fn pem(file: EtcdFile, path: &Path, section: &str) -> Result<String, EtcdError> {
    let text = read(file, path)?;
    if !text.contains(section) {
        return Err(bad(file, path, format!("has no section '{}', but must be PEM", section.trim_end_matches('-'))));
    }
    Ok(text)
}

fn read(file: EtcdFile, path: &Path) -> Result<String, EtcdError> {
    let large = |metadata: std::fs::Metadata| metadata.len() > MAX_FILE_BYTES;
    if std::fs::metadata(path).is_ok_and(large) {
        return Err(bad(file, path, format!("has more than {MAX_FILE_BYTES} bytes")));
    }
    std::fs::read_to_string(path).map_err(|error| bad(file, path, format!("cannot be read: {error}")))
}

fn bad(file: EtcdFile, path: &Path, problem: impl Into<String>) -> EtcdError {
    EtcdError::File { file, path: path.to_owned(), problem: problem.into() }
}

/// Asks a member of etcd, if need be for a token, as it is said now: files that were replaced are
/// used. One member at a time: one that hangs would be asked again and again beside those that
/// answer.
///
/// # Errors
/// A file cannot be used, or the member does not answer or does not know the user.
pub(crate) async fn connect(etcd: &Etcd, member: usize, clock: &dyn Clock) -> Result<Client, EtcdError> {
    answered(clock, Client::connect([etcd.member(member)], Some(etcd.options()?))).await
}

/// What etcd says in time.
pub(crate) async fn answered<T>(
    clock: &dyn Clock,
    asked: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, EtcdError> {
    Ok(within(clock, ANSWER, asked).await.ok_or(EtcdError::Silent(ANSWER))??)
}

/// Why etcd's client failed: the bottom of it, as that of TLS.
pub(crate) fn reason(error: &etcd_client::Error) -> String {
    match error {
        etcd_client::Error::GRpcStatus(status) => match std::error::Error::source(status) {
            Some(source) => error_chain(source),
            None => status.message().to_owned(),
        },
        etcd_client::Error::TransportError(error) => error_chain(error),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    fn said(etcd: &Etcd) -> (EtcdFile, String) {
        let error = etcd.check().unwrap_err();
        let text = error.to_string();
        match error {
            EtcdError::File { file, .. } => (file, text),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn password_file_is_read_without_its_final_newline() {
        for (text, password) in [("a b \n", "a b "), ("a\r\n", "a"), ("a\n\n", "a\n"), (" a", " a")] {
            let file = file(text);
            let user = User { name: "baton".into(), password: file.path().into() };
            assert_eq!(user.password().unwrap(), password, "{text:?}");
        }
        let empty = file("\n");
        let user = Some(User { name: "baton".into(), password: empty.path().into() });
        let (file, text) = said(&Etcd { user, ..Etcd::new(vec![], "/baton") });
        assert!(file == EtcdFile::Password && text.contains("is empty"), "{text}");
    }

    #[test]
    fn unusable_certificate_or_key_file_is_named_in_error() {
        let other = file("no certificate");
        let path = PathBuf::from("/no/such.pem");
        let broken = file("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n");
        let tls = |authorities: &Path, identity| Etcd {
            tls: Some(Tls { authorities: authorities.into(), identity }),
            ..Etcd::new(vec![], "/baton")
        };
        let (kind, text) = said(&tls(&path, None));
        assert!(kind == EtcdFile::Authorities && text.starts_with("/no/such.pem cannot be read"), "{text}");
        let (kind, text) = said(&tls(other.path(), None));
        assert!(kind == EtcdFile::Authorities && text.contains("has no section 'CERTIFICATE'"), "{text}");
        let (kind, text) = said(&tls(broken.path(), None));
        assert!(kind == EtcdFile::Authorities && text.contains(&*broken.path().to_string_lossy()), "{text}");
        // An authority's certificate is not looked into before one is needed.
        let authority = file("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        let identity =
            |certificate: &Path, key: &Path| Some(CertifiedKey { certificate: certificate.into(), key: key.into() });
        let (kind, text) = said(&tls(authority.path(), identity(&path, other.path())));
        assert!(kind == EtcdFile::Certificate && text.contains("/no/such.pem"), "{text}");
        let (kind, text) = said(&tls(authority.path(), identity(authority.path(), other.path())));
        assert!(kind == EtcdFile::Key && text.contains("'PRIVATE KEY'"), "{text}");
        let key = file("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
        let (kind, text) = said(&tls(authority.path(), identity(authority.path(), key.path())));
        assert!(kind == EtcdFile::Key && text.contains("with its certificate"), "{text}");
    }
}

//! Conductors whose etcd wants TLS and users, compacts its history, or is not there.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Certificates, Etcd, PROXIED_HOST, Process, Proxy};
use etcd_client::{Client, ConnectOptions, Permission, PermissionType, TlsOptions};
use tonic::transport::{Certificate, Identity};

use crate::leaders::{LIMIT, leads};

/// How long a token lives.
const TOKEN_TTL: Duration = Duration::from_secs(2);

/// A conductor with these flags.
async fn conductor(folder: &Path, name: &str, etcd: &str, flags: &[&str]) -> anyhow::Result<Process> {
    let ports = ["--engine", "mock", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--etcd", etcd];
    let arguments: Vec<_> = ports.iter().chain(flags).map(ToString::to_string).collect();
    Process::start("baton-conductor", &arguments, folder.join(format!("{name}.log"))).await
}

fn log(conductor: &Process) -> anyhow::Result<String> {
    Ok(std::fs::read_to_string(&conductor.log)?)
}

/// Waits until a conductor has logged that.
async fn says(conductor: &Process, what: &[&str]) -> anyhow::Result<()> {
    let says = async {
        loop {
            let log = log(conductor)?;
            if log.lines().any(|line| what.iter().all(|part| line.contains(part))) {
                return anyhow::Ok(());
            }
            baton_runtime::sleep(Duration::from_millis(50)).await;
        }
    };
    let said = tokio::time::timeout(LIMIT, says).await;
    said.with_context(|| format!("never: {what:?} in {}", log(conductor).unwrap_or_default()))?
}

/// Retries until etcd is there.
async fn client(address: &str, options: Option<ConnectOptions>) -> anyhow::Result<Client> {
    let answers = async {
        loop {
            if let Ok(mut client) = Client::connect([address], options.clone()).await
                && client.status().await.is_ok()
            {
                return client;
            }
            baton_runtime::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LIMIT, answers).await.context("etcd does not answer")
}

/// An etcd that wants certificates, and each cluster's user, who may touch its own keys.
struct Guarded {
    etcd: Etcd,
    certificates: Certificates,
}

impl Guarded {
    async fn start() -> anyhow::Result<Self> {
        let certificates = Certificates::new()?;
        certificates.issue("etcd", &["subjectAltName=IP:127.0.0.1", "extendedKeyUsage=serverAuth,clientAuth"])?;
        certificates.issue("conductor", &["extendedKeyUsage=clientAuth"])?;
        std::fs::write(certificates.path("token.key"), "a secret of this test")?;
        let path = |file: &str| certificates.path(file).display().to_string();
        // Other than etcd's simple tokens, these end though they are used.
        let token = format!("jwt,sign-method=HS256,priv-key={},ttl={TOKEN_TTL:?}", path("token.key"));
        let etcd = Etcd::start_with(&[
            "--cert-file",
            &path("etcd.pem"),
            "--key-file",
            &path("etcd.key"),
            "--client-cert-auth",
            "--trusted-ca-file",
            &path("ca.pem"),
            "--auth-token",
            &token,
        ])?;
        let guarded = Self { etcd, certificates };
        guarded.make_users().await?;
        Ok(guarded)
    }

    async fn make_users(&self) -> anyhow::Result<()> {
        let read = |file: &str| std::fs::read_to_string(self.certificates.path(file));
        let tls = TlsOptions::new()
            .ca_certificate(Certificate::from_pem(read("ca.pem")?))
            .identity(Identity::from_pem(read("conductor.pem")?, read("conductor.key")?));
        let mut client = client(self.etcd.address(), Some(ConnectOptions::new().with_tls(tls))).await?;
        for name in ["blue", "green"] {
            client.role_add(name).await?;
            let own = Permission::new(PermissionType::Readwrite, format!("/{name}/")).with_prefix();
            client.role_grant_permission(name, own).await?;
            client.user_add(name, format!("secret of {name}"), None).await?;
            client.user_grant_role(name, name).await?;
            std::fs::write(self.certificates.path(name), format!("secret of {name}\n"))?;
        }
        client.user_add("root", "secret of root", None).await?;
        client.user_grant_role("root", "root").await?;
        client.auth_enable().await?;
        Ok(())
    }

    /// Starts a conductor of a cluster, with other values of some flags; an empty one leaves the
    /// flag out.
    async fn conductor(&self, log: &str, cluster: &str, other: &[(&str, &str)]) -> anyhow::Result<Process> {
        let prefix = format!("/{cluster}");
        let path = |file: &str| self.certificates.path(file).display().to_string();
        let mut flags = vec![
            ("--etcd-prefix", prefix.clone()),
            ("--etcd-ca", path("ca.pem")),
            ("--etcd-cert", path("conductor.pem")),
            ("--etcd-key", path("conductor.key")),
            ("--etcd-user", cluster.to_owned()),
            ("--etcd-password-file", path(cluster)),
        ];
        for (flag, value) in &mut flags {
            if let Some((_, other)) = other.iter().find(|(other, _)| other == flag) {
                *value = if other.is_empty() || other.starts_with('/') { (*other).to_owned() } else { path(other) };
            }
        }
        let given = flags.iter().filter(|(_, value)| !value.is_empty());
        let flags: Vec<_> = given.flat_map(|(flag, value)| [*flag, value.as_str()]).collect();
        conductor(self.certificates.path("").as_path(), log, self.etcd.address(), &flags).await
    }
}

#[tokio::test]
#[ignore = "needs etcd and openssl"]
async fn etcd_with_tls_and_users_keeps_leaders_beyond_token_expiry() -> anyhow::Result<()> {
    let guarded = Guarded::start().await?;
    let blue = guarded.conductor("blue", "blue", &[]).await?;
    let green = guarded.conductor("green", "green", &[]).await?;
    leads(&blue).await?;
    leads(&green).await?;
    let follower = guarded.conductor("follower", "blue", &[]).await?;
    says(&follower, &["who leads", "Other"]).await?;
    baton_runtime::sleep(4 * TOKEN_TTL).await;
    for (conductor, elections) in [(&blue, 1), (&green, 1), (&follower, 0)] {
        let log = log(conductor)?;
        assert_eq!(log.matches("this conductor leads").count(), elections, "{log}");
        assert!(!log.contains("etcd is unreachable") && !log.contains("the lease ended"), "{log}");
    }
    assert_eq!(follower.metric("baton_conductor_leads").await?, 0.0);
    blue.kill().await?;
    leads(&follower).await
}

#[tokio::test]
#[ignore = "needs etcd and openssl"]
async fn etcd_that_takes_no_credentials_is_logged_until_files_are_right() -> anyhow::Result<()> {
    let guarded = Guarded::start().await?;
    let no_certificate = [("--etcd-cert", ""), ("--etcd-key", "")];
    for (name, other, said) in [
        ("authority", &[("--etcd-ca", "other.pem")][..], "UnknownIssuer"),
        ("certificate", &no_certificate, "Certificate"),
        ("role", &[("--etcd-prefix", "/green")], "permission denied"),
    ] {
        let conductor = guarded.conductor(name, "blue", other).await?;
        says(&conductor, &["etcd is unreachable", said]).await?;
        assert_eq!(conductor.metric("baton_conductor_leads").await?, 0.0);
    }
    let password = guarded.certificates.path("rotated");
    std::fs::write(&password, "yesterday's")?;
    let conductor = guarded.conductor("password", "blue", &[("--etcd-password-file", "rotated")]).await?;
    says(&conductor, &["etcd is unreachable", "invalid user ID or password"]).await?;
    std::fs::remove_file(&password)?;
    says(&conductor, &["etcd is unreachable", "rotated cannot be read"]).await?;
    std::fs::write(&password, "secret of blue\n")?;
    leads(&conductor).await?;
    assert!(!log(&conductor)?.contains("secret of"), "a password is not logged");
    let error = guarded.conductor("wrong", "blue", &[("--etcd-key", "other.key")]).await.err();
    let error = format!("{:#}", error.context("it ends")?);
    assert!(error.contains("--etcd-key: ") && error.contains("other.key"), "{error}");
    Ok(())
}

/// What a watch asks for may be compacted before it begins: each message to etcd takes its time
/// here.
#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_compaction_restarts_the_watch_for_the_leader() -> anyhow::Result<()> {
    let etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let leader = conductor(folder.path(), "leader", etcd.address(), &[]).await?;
    leads(&leader).await?;
    let port: u16 = etcd.address().rsplit(':').next().context("a port")?.parse()?;
    let proxy = Proxy::before(port).await?;
    proxy.set_delay(Duration::from_millis(100));
    let stop = Arc::new(AtomicBool::new(false));
    let mut client = client(etcd.address(), None).await?;
    let compacting = tokio::spawn({
        let stop = Arc::clone(&stop);
        async move {
            while !stop.load(Ordering::Relaxed) {
                let put = client.put("/elsewhere", "", None).await?;
                client.compact(put.header().context("header")?.revision(), None).await?;
                baton_runtime::sleep(Duration::from_millis(10)).await;
            }
            anyhow::Ok(())
        }
    });
    let follower = conductor(folder.path(), "follower", &format!("{PROXIED_HOST}:{port}"), &[]).await?;
    says(&follower, &["restarting the leader watch", "compacted"]).await?;
    baton_runtime::sleep(2 * baton_membership::LEASE).await;
    let log_of_leader = log(&leader)?;
    let log_of_follower = log(&follower)?;
    assert_eq!(log_of_leader.matches("who leads leadership").count(), 1, "{log_of_leader}");
    assert_eq!(log_of_follower.matches("who leads leadership").count(), 1, "{log_of_follower}");
    leader.kill().await?;
    leads(&follower).await?;
    stop.store(true, Ordering::Relaxed);
    compacting.await??;
    // In peace again, a watch tells of what comes: no conductor waits for a lease.
    proxy.set_delay(Duration::ZERO);
    let next = conductor(folder.path(), "next", etcd.address(), &[]).await?;
    says(&next, &["who leads", "Other"]).await?;
    follower.stop().await?;
    leads(&next).await
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_unreachable_at_start_is_waited_for() -> anyhow::Result<()> {
    let mut etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    etcd.kill().await?;
    let conductor = conductor(folder.path(), "conductor", etcd.address(), &[]).await?;
    says(&conductor, &["etcd is unreachable", "Connection refused"]).await?;
    assert_eq!(conductor.metric("baton_conductor_leads").await?, 0.0);
    etcd.restart(true)?;
    leads(&conductor).await?;
    says(&conductor, &["etcd is there"]).await
}

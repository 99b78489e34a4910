//! Another decode node for a sequence whose own has no room for it, or is on its way out.

use std::time::{Duration, Instant};

use baton_types::{MigrationQuestion, NodeId, NodeRole, RequestKey};

use super::candidates::has_seat;
use super::{Cluster, ClusterNode};
use crate::decode::OUTGROWN_MARGIN;
use crate::ledger::{Charge, DecodeCharge, FetchCharge, Placed};
use crate::placement::PrefixFetch;

/// Blocks of its output that a sequence should find room for at its new node.
const GROWTH_BLOCKS: usize = 4;

/// Another decode node for a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationChoice {
    /// Where it goes on.
    pub to: NodeId,
    /// Where it is, and what of it can be fetched from there.
    pub fetch: PrefixFetch,
}

impl Cluster {
    /// The decode node with the most room, by its last report, for a sequence of `tokens` tokens so
    /// far that decodes under `key`. It is another node than its own, of the same KV compatibility
    /// class. The sequence is charged there as `migrated`, beside its charge at its own node, and
    /// the caller ends one of the two. `None` if no node but those in `exclude` has room now.
    pub fn place_migration(&mut self, now: Instant, question: &MigrationQuestion) -> Option<MigrationChoice> {
        let MigrationQuestion { key, migrated, tokens, ref exclude } = *question;
        let Placed { at: from, charge } = self.ledger.decoding(key)?.clone();
        let source = self.nodes.get(&from.node)?;
        let charge = source.charges.decode(key).unwrap_or(charge);
        let class = source.class;
        let layout = &source.info().layout;
        let full = tokens.saturating_sub(1) / layout.block_tokens;
        let bytes = u64::from(full) * layout.block_bytes_all_layers() as u64;
        let to = self.roomiest_other(&from.node, &charge, tokens, |node| {
            node.class == class && !exclude.contains(&node.info().node)
        })?;
        let start = to.info().start();
        let fetch = PrefixFetch { from: from.node.clone(), tokens: full * layout.block_tokens, bytes };
        let to = start.node.clone();
        let charge = DecodeCharge { begun: true, charged: now, ..charge };
        let charge = Charge {
            fetch: Some(FetchCharge { from, bytes }),
            decode: Some(Placed { at: start, charge }),
            ttft: Some(Duration::ZERO),
            prefilled: true,
            ..Charge::new(now, now)
        };
        self.ledger.insert(migrated, charge, &mut self.nodes);
        Some(MigrationChoice { to, fetch })
    }

    /// Another decode node for a request whose own refused it a grant: the one with the most room,
    /// by its last report. It is charged there from now on, and no more at its former node. `None`
    /// if no node has room now: it stays at its node.
    pub fn reselect(&mut self, now: Instant, key: RequestKey) -> Option<NodeId> {
        let Placed { at: from, charge } = self.ledger.decoding(key)?;
        let to = self.roomiest_other(&from.node, charge, charge.prompt_tokens, |_| true)?.info().node.clone();
        self.ledger.change_decode_node(now, key, &to, &mut self.nodes);
        Some(to)
    }

    fn roomiest_other(
        &self,
        than: &NodeId,
        charge: &DecodeCharge,
        tokens: u32,
        fits: impl Fn(&ClusterNode) -> bool,
    ) -> Option<&ClusterNode> {
        let nodes = self.nodes.of_role(NodeRole::Decode);
        let others = nodes.filter(|node| fits(node) && node.info().node != *than && node.is_ready());
        let takers = others.filter(|node| node.load().accepts_migrations && has_seat(node));
        // One that has never answered is tried with one.
        let takers = takers.filter(|node| node.trust.has_answered() || node.charges.sequences() == 0);
        let roomy = takers.filter_map(|node| Some((spare_blocks(node, charge, tokens)?, node)));
        let kept = roomy.filter(|(_, node)| self.keeps_paces(node, charge, tokens));
        Some(kept.max_by_key(|(spare, _)| *spare)?.1)
    }

    /// Whether the node's steps with the sequence keep to its objective, and to those of the ones
    /// that are there.
    fn keeps_paces(&self, node: &ClusterNode, charge: &DecodeCharge, tokens: u32) -> bool {
        let sequences = node.charges.sequences() as f64;
        let kv_tokens = node.charges.kv_tokens as f64;
        let without = self.predictor.high_step_seconds(node, sequences, kv_tokens);
        let with = self.predictor.high_step_seconds(node, sequences + 1.0, kv_tokens + f64::from(tokens));
        charge.tbt.is_none_or(|limit| with <= limit.as_secs_f64()) && !node.charges.has_tbt_limit_in(without, with)
    }
}

/// Blocks that are left at a node once it has the sequence and room for it to grow. `None` if it
/// has no room, or no slot: a migrated sequence does not wait there.
fn spare_blocks(node: &ClusterNode, charge: &DecodeCharge, tokens: u32) -> Option<usize> {
    let load = node.load();
    let layout = &node.info().layout;
    let profile = &node.info().profile;
    let wanted = charge.prompt_tokens.saturating_add(charge.max_tokens).min(node.info().context_length);
    let total = wanted.min(node.info().max_sequence_tokens());
    // It would leave a node that is no larger than its own as soon as it is there.
    if total < wanted.min(tokens.saturating_add(2 * OUTGROWN_MARGIN as u32)) {
        return None;
    }
    let most = layout.blocks_for(total.saturating_sub(1) as usize);
    let free = (load.blocks_total as usize).checked_sub(load.blocks_used as usize + load.blocks_reserved as usize)?;
    // What was placed there since is not in the report.
    let (unknown, unknown_blocks) = node.charges.charged_since(node.reported());
    let occupied = load.running as usize + load.waiting as usize + unknown;
    if profile.max_running > 0 && occupied >= profile.max_running as usize {
        return None;
    }
    let grown = most.min(layout.blocks_for(tokens as usize) + GROWTH_BLOCKS);
    free.checked_sub(unknown_blocks + grown + load.running as usize)
}

#[cfg(test)]
mod tests {
    use baton_types::{Attempt, Load, Slo, Tbt};

    use super::super::tests::{cluster, id, info, key, place, request};
    use super::*;
    use crate::cost::duration;
    use crate::placement::{PlacementKind, PlacementRequest};

    const MS: Duration = Duration::from_millis(1);

    fn migrated(n: u128) -> RequestKey {
        RequestKey { attempt: Attempt(1), ..key(n) }
    }

    fn question(n: u128) -> MigrationQuestion {
        MigrationQuestion { key: key(n), migrated: migrated(n), tokens: 170, exclude: Vec::new() }
    }

    fn report(blocks_used: u32) -> Load {
        Load { blocks_total: 100, blocks_used, accepts_migrations: true, ..Load::default() }
    }

    #[test]
    fn migration_goes_to_decode_node_with_room_in_last_report() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::CacheAware);
        cluster.on_node_joined(now, info("d2", NodeRole::Decode, 1));
        let from = place(&mut cluster, now, &request(1, &[])).unwrap().decode.unwrap();
        let others: Vec<_> = ["d0", "d1", "d2"].into_iter().map(id).filter(|node| *node != from).collect();
        assert_eq!(cluster.place_migration(now, &question(1)), None, "no node said that it takes any");
        let now = now + MS;
        cluster.on_load(now, &from, report(0));
        cluster.on_load(now, &others[0], report(50));
        cluster.on_load(now, &others[1], report(40));
        assert_eq!(cluster.place_migration(now, &question(9)), None, "it is unknown");
        let first = cluster.place_migration(now, &question(1)).unwrap();
        assert_eq!((&first.to, &first.fetch.from), (&others[1], &from));
        assert_eq!((first.fetch.tokens, first.fetch.bytes), (160, 10 * 4 * 2 * 16 * 8 * 2));
        // 11 blocks more were charged there since it reported, which makes it 51.
        let request_2 = PlacementRequest { exclude: &others, ..request(2, &[]) };
        place(&mut cluster, now, &request_2).unwrap();
        assert_eq!(cluster.place_migration(now, &question(2)).unwrap().to, others[0]);
        for node in &others {
            cluster.on_load(now + MS, node, report(90));
        }
        assert_eq!(cluster.place_migration(now + MS, &question(2)), None, "10 blocks are free, 11 wanted");
        cluster.on_load(now + MS, &others[0], Load { accepts_migrations: false, ..report(0) });
        cluster.on_load(now + MS, &others[1], Load { draining: true, ..report(0) });
        assert_eq!(cluster.place_migration(now + MS, &question(2)), None);
        for n in 1..=2 {
            cluster.on_ended(now, key(n));
            cluster.on_ended(now, migrated(n));
        }
        assert!(cluster.nodes().all(|node| node.charges.is_zero()) && cluster.placed() == 0);
    }

    #[test]
    fn reselect_moves_charge_to_decode_node_with_room() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::CacheAware);
        let from = place(&mut cluster, now, &request(1, &[])).unwrap().decode.unwrap();
        let other = if from == id("d0") { id("d1") } else { id("d0") };
        assert_eq!(cluster.reselect(now, key(1)), None, "no node said that it takes any");
        cluster.on_load(now + MS, &other, report(95));
        assert_eq!(cluster.reselect(now + MS, key(1)), None, "no room there either");
        cluster.on_load(now + MS, &other, report(0));
        assert_eq!(cluster.reselect(now + MS, key(1)), Some(other.clone()));
        assert!(cluster.node(&from).unwrap().charges.is_zero());
        assert_eq!(cluster.node(&other).unwrap().charges.sequences(), 1);
        cluster.on_first_token(now + 2 * MS, key(1));
        cluster.on_load(now + 2 * MS, &from, report(0));
        assert_eq!(cluster.reselect(now + 2 * MS, key(1)), Some(from.clone()), "and back");
        assert_eq!(cluster.node(&from).unwrap().charges.decoding_now().sequences, 1.0, "its first token is out");
        let (charged, blocks) = cluster.node(&from).unwrap().charges.charged_since(now + 2 * MS);
        assert!(charged == 1 && blocks > 0, "no report knows of it yet");
        cluster.on_ended(now + 2 * MS, key(1));
        assert!(cluster.nodes().all(|node| node.charges.is_zero()) && cluster.placed() == 0);
        assert_eq!(cluster.reselect(now, key(1)), None, "it is unknown by now");
    }

    #[test]
    fn sequence_that_outgrows_its_node_migrates_to_a_larger_one_only() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::CacheAware);
        let open = PlacementRequest { max_tokens: 1888, ..request(1, &[]) };
        let from = place(&mut cluster, now, &open).unwrap().decode.unwrap();
        let other = if from == id("d0") { id("d1") } else { id("d0") };
        // Each holds 1,600 tokens.
        cluster.on_load(now + MS, &other, report(0));
        let near_its_end = MigrationQuestion { tokens: 1540, ..question(1) };
        assert_eq!(cluster.place_migration(now + MS, &near_its_end), None, "the other node is as small");
        let mut large = info("d2", NodeRole::Decode, 1);
        large.layout.num_blocks = 200;
        cluster.on_node_joined(now, large);
        cluster.on_load(now + MS, &id("d2"), Load { blocks_total: 200, ..report(0) });
        assert_eq!(cluster.place_migration(now + MS, &near_its_end).map(|to| to.to), Some(id("d2")));
    }

    #[test]
    fn migration_avoids_node_where_it_would_break_a_tbt_objective() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::CacheAware);
        let steps =
            |cluster: &Cluster, n: f64| cluster.predictor.high_step_seconds(cluster.node(&id("d0")).unwrap(), n, 0.0);
        let limit = duration((steps(&cluster, 1.0) + steps(&cluster, 2.0)) / 2.0);
        let tight = Slo { tbt: Some(Tbt(limit)), ..Slo::default() };
        let from =
            place(&mut cluster, now, &PlacementRequest { slo: tight, ..request(1, &[]) }).unwrap().decode.unwrap();
        let other = if from == id("d0") { id("d1") } else { id("d0") };
        cluster.on_load(now + MS, &other, report(0));
        assert_eq!(cluster.place_migration(now + MS, &question(1)).map(|to| to.to), Some(other.clone()));
        cluster.on_ended(now + MS, key(1));
        let second = PlacementRequest { exclude: std::slice::from_ref(&other), ..request(2, &[]) };
        place(&mut cluster, now + MS, &second).unwrap();
        assert_eq!(cluster.place_migration(now + MS, &question(2)), None, "it would slow the first one down");
        cluster.on_ended(now + MS, migrated(1));
        assert!(cluster.place_migration(now + MS, &question(2)).is_some());
    }
}

//! Where the writer says which parts are still wanted.

#![allow(unsafe_code)] // atomics in a page that another process reads; see the SAFETY notes

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex, PoisonError};

use baton_memory::{MemoryRegion, SharedView};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::fence_guard::FenceGuard;
use crate::transport::net::wire::Place;

/// Slots of a lane, and with it the most parts that are under way there: one page.
pub(super) const SLOTS: usize = 512;

/// The writer's page.
pub(crate) struct Slots {
    page: MemoryRegion,
    /// For the owner; closed when it has been passed.
    file: Mutex<Option<OwnedFd>>,
    free: Mutex<Vec<u32>>,
    places: Arc<Semaphore>,
    next_token: AtomicU64,
}

/// A slot in use. Dropped, the part is not wanted any more.
pub(crate) struct Armed {
    slots: Arc<Slots>,
    place: Place,
    _permit: OwnedSemaphorePermit,
}

impl Slots {
    pub(super) fn new() -> io::Result<Self> {
        let mut page = MemoryRegion::allocate_shared(SLOTS * size_of::<u64>()).map_err(io::Error::other)?;
        let file = Mutex::new(page.take_shared_file());
        let free = Mutex::new((0..SLOTS as u32).collect());
        Ok(Self { page, file, free, places: Arc::new(Semaphore::new(SLOTS)), next_token: AtomicU64::new(1) })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.page.len() as u64
    }

    /// The page as a file, to be passed once.
    pub(super) fn take_file(&self) -> Option<OwnedFd> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Takes a slot for a part whose batch has this fence guard; waits for one. `None`: the batch
    /// is over.
    pub(super) async fn arm(self: &Arc<Self>, fence: &FenceGuard) -> Option<Armed> {
        let permit = Arc::clone(&self.places).acquire_owned().await.ok()?;
        let slot = self.free().pop()?;
        let token = self.next_token.fetch_add(1, SeqCst);
        let armed = Armed { slots: Arc::clone(self), place: Place { slot, token }, _permit: permit };
        self.at(slot).store(token, SeqCst);
        let slots = Arc::clone(self);
        fence.on_close(move || slots.clear(slot, token));
        (!fence.is_closed()).then_some(armed)
    }

    /// Clears the slot unless another part has it by now.
    fn clear(&self, slot: u32, token: u64) {
        // Whether it was still this part's does not matter.
        let _ = self.at(slot).compare_exchange(token, 0, SeqCst, SeqCst);
        // What the writer does to the source afterwards must not be seen before the slot is.
        fence(SeqCst);
    }

    fn at(&self, slot: u32) -> &AtomicU64 {
        debug_assert!((slot as usize) < SLOTS);
        // SAFETY: inside the page, which is aligned, lives as long as `self`, and is only ever used
        // as atomics.
        unsafe { AtomicU64::from_ptr(self.page.as_ptr().cast::<u64>().add(slot as usize)) }
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Armed {
    pub(super) fn place(&self) -> Place {
        self.place
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.slots.clear(self.place.slot, self.place.token);
        self.slots.free().push(self.place.slot);
    }
}

/// Whether a part is still wanted, as the writer's page says. A slot that does not exist says no.
pub(super) fn is_wanted(page: &SharedView, place: Place) -> bool {
    let Place { slot, token } = place;
    let at = slot as usize * size_of::<u64>();
    if token == 0 || at + size_of::<u64>() > page.len() {
        return false;
    }
    // What was copied before this was read before the slot is.
    fence(SeqCst);
    // SAFETY: inside the mapping (checked) and aligned; the page is read-only here, and the only
    // access is this atomic load, which does not write.
    let value = unsafe { &*page.as_ptr().add(at).cast::<AtomicU64>() }.load(SeqCst);
    value == token
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[tokio::test]
    async fn part_in_shm_slot_is_wanted_until_its_batch_ends_or_it_is_dropped() {
        let slots = Arc::new(Slots::new().unwrap());
        let page = SharedView::map(slots.take_file().unwrap().as_fd(), slots.bytes()).unwrap();
        let fence = FenceGuard::default();
        let first = slots.arm(&fence).await.unwrap();
        let second = slots.arm(&FenceGuard::default()).await.unwrap();
        let a = first.place();
        let b = second.place();
        assert!(is_wanted(&page, a) && is_wanted(&page, b) && !is_wanted(&page, Place { token: b.token, ..a }));
        fence.close();
        assert!(!is_wanted(&page, a) && is_wanted(&page, b));
        drop(first);
        drop(second);
        assert!(!is_wanted(&page, b) && !is_wanted(&page, Place { slot: SLOTS as u32, ..b }));
        assert!(slots.arm(&fence).await.is_none(), "its batch is over");
        let again = slots.arm(&FenceGuard::default()).await.unwrap();
        fence.close();
        assert!(is_wanted(&page, again.place()), "an old batch's end does not touch a new part's slot");
        assert_eq!(slots.free().len(), SLOTS - 1);
    }
}

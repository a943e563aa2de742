//! Copies of bytes that the guest may be writing, by machine instructions about which the compiler makes no assumptions.

use std::sync::atomic::{Ordering, compiler_fence};

/// The least length for which wide registers are used.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 1024;
/// Below this length single moves are used: `rep movs` takes tens of cycles to start.
#[cfg(target_arch = "x86_64")]
const SMALL: usize = 64;
/// Bytes moved per loop iteration with wide registers.
#[cfg(target_arch = "x86_64")]
const ROUND: usize = 1024;

/// Copies bytes that the guest may be writing.
///
/// # Safety
/// Both must be valid for `bytes` bytes and not overlap.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    let mut done = 0;
    compiler_fence(Ordering::SeqCst);
    if bytes < SMALL {
        done = bytes;
        // SAFETY: within both.
        unsafe { copy_small(from, to, bytes) };
    } else if bytes >= WIDE && std::arch::is_x86_feature_detected!("avx") {
        done = bytes - bytes % ROUND;
        // SAFETY: within both; the processor has the registers.
        unsafe { copy_wide(from, to, done / ROUND) };
    }
    if done < bytes {
        // SAFETY: the remaining bytes of both.
        unsafe { copy_words(from.wrapping_add(done), to.wrapping_add(done), bytes - done) };
    }
    compiler_fence(Ordering::SeqCst);
}

/// Copies `rounds` times [`ROUND`] bytes.
///
/// # Safety
/// As [`copy`]; the processor must have AVX.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_wide(from: *const u8, to: *mut u8, rounds: usize) {
    // SAFETY: copies exactly `rounds` rounds, at least one; all registers it uses are declared. The
    // compiler makes no assumption about what the instructions read.
    unsafe {
        std::arch::asm!(
            "2:",
            ".irp half, 0, 512",
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
            "vmovdqu ymm\\n, [rsi + \\half + 32 * \\n]",
            ".endr",
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
            "vmovdqu [rdi + \\half + 32 * \\n], ymm\\n",
            ".endr",
            ".endr",
            "add rsi, 1024",
            "add rdi, 1024",
            "dec rcx",
            "jnz 2b",
            "vzeroupper",
            inout("rcx") rounds => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack),
        );
    }
}

/// Copies a few bytes: headers, descriptors, status bytes.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_small(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: moves exactly `bytes` bytes forward, words first and then single bytes; all registers it uses are declared.
    // The compiler makes no assumption about what the instructions read.
    unsafe {
        std::arch::asm!(
            "sub {left}, 8",
            "jb 3f",
            "2:",
            "mov {word}, [{from}]",
            "mov [{to}], {word}",
            "add {from}, 8",
            "add {to}, 8",
            "sub {left}, 8",
            "jae 2b",
            "3:",
            "add {left}, 8",
            "jz 5f",
            "4:",
            "mov {byte}, byte ptr [{from}]",
            "mov byte ptr [{to}], {byte}",
            "inc {from}",
            "inc {to}",
            "dec {left}",
            "jnz 4b",
            "5:",
            left = inout(reg) bytes => _,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            word = out(reg) _,
            byte = out(reg_byte) _,
            options(nostack),
        );
    }
}

/// Copies bytes by words.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_words(from: *const u8, to: *mut u8, bytes: usize) {
    let (words, rest) = (bytes / 8, bytes % 8);
    // SAFETY: moves exactly `bytes` bytes forward; the direction flag is clear by the ABI. The
    // compiler makes no assumption about what the instructions read.
    unsafe {
        std::arch::asm!(
            "rep movsq",
            "mov rcx, {rest}",
            "rep movsb",
            rest = in(reg) rest,
            inout("rcx") words => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies bytes that the guest may be writing.
///
/// # Safety
/// Both must be valid for `bytes` bytes and not overlap.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    compiler_fence(Ordering::SeqCst);
    let mut at = 0;
    while at < bytes {
        let word = bytes - at >= 8 && (from.addr() + at) % 8 == 0 && (to.addr() + at) % 8 == 0;
        // SAFETY: within both, and aligned where a word is moved.
        unsafe {
            if word {
                let value = from.add(at).cast::<u64>().read_volatile();
                to.add(at).cast::<u64>().write_volatile(value);
            } else {
                to.add(at).write_volatile(from.add(at).read_volatile());
            }
        }
        at += if word { 8 } else { 1 };
    }
    compiler_fence(Ordering::SeqCst);
}

//! The functions a compiler calls without being asked, for programs without libc.
//!
//! Naked, so that the compiler cannot recognise a copy in memcpy and call memcpy for it. The string instructions
//! need the direction flag clear at entry, as the System V ABI says it is.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};

/// Copies `n` bytes and returns `dest`.
///
/// # Safety
/// As C says: both ranges valid, no overlap.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memcpy(dest: *mut c_void, src: *const c_void, n: usize) -> *mut c_void {
    naked_asm!("mov rax, rdi", "mov rcx, rdx", "rep movsb", "ret")
}

/// Copies `n` bytes between ranges that may overlap and returns `dest`.
///
/// # Safety
/// As C says: both ranges valid.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memmove(dest: *mut c_void, src: *const c_void, n: usize) -> *mut c_void {
    naked_asm!(
        "mov rax, rdi",
        "mov rcx, rdx",
        // Upwards, unless `dest` starts inside `src`; the subtraction wraps when it starts below.
        "mov r8, rdi",
        "sub r8, rsi",
        "cmp r8, rdx",
        "jb 2f",
        "rep movsb",
        "ret",
        "2:",
        "lea rdi, [rdi + rdx - 1]",
        "lea rsi, [rsi + rdx - 1]",
        "std",
        "rep movsb",
        "cld",
        "ret",
    )
}

/// Sets `n` bytes to the low byte of `value` and returns `dest`.
///
/// # Safety
/// As C says: the range valid.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memset(dest: *mut c_void, value: c_int, n: usize) -> *mut c_void {
    naked_asm!("mov r8, rdi", "mov eax, esi", "mov rcx, rdx", "rep stosb", "mov rax, r8", "ret")
}

/// Below, at or above zero as the first byte that differs is lower, absent or higher in `left`.
///
/// # Safety
/// As C says: both ranges valid.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memcmp(left: *const c_void, right: *const c_void, n: usize) -> c_int {
    naked_asm!(
        "mov rcx, rdx",
        // Also sets the zero flag, which cmpsb leaves alone when n is 0.
        "xor eax, eax",
        "repe cmpsb",
        "je 2f",
        "movzx eax, byte ptr [rdi - 1]",
        "movzx ecx, byte ptr [rsi - 1]",
        "sub eax, ecx",
        "2:",
        "ret",
    )
}

/// Zero when the ranges are equal.
///
/// # Safety
/// As C says: both ranges valid.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn bcmp(left: *const c_void, right: *const c_void, n: usize) -> c_int {
    naked_asm!("jmp {}", sym memcmp)
}

//! The scenario without an operating system: `qemu-system-x86_64 -kernel` enters it through a PVH note, its output is
//! COM1, and its verdict is the exit code of QEMU: 33 passed, 35 not. A triple fault is 0 (with `-no-reboot`).

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use core::fmt::{self, Write};
use core::panic::PanicInfo;

// QEMU exits with 2 * value + 1 when a value is written to the port of its isa-debug-exit device.
const EXIT_PORT: u16 = 0xf4;
const EXIT_PASSED: u32 = 16;
const EXIT_FAILED: u32 = 17;

const COM1: u16 = 0x3f8;
const COM1_LINE_STATUS: u16 = COM1 + 5;
const LINE_HOLDING_EMPTY: u8 = 1 << 5;
const LINE_ALL_SENT: u8 = 1 << 6;

// Intel SDM volume 3, 2.5 (CR0, CR4), 2.2.1 (EFER), 4.5 (page tables).
const CR0_PROTECTED: u32 = 1 << 0;
const CR0_MONITOR_COPROCESSOR: u32 = 1 << 1;
const CR0_EMULATE_FPU: u32 = 1 << 2;
const CR0_PAGING: u32 = 1 << 31;
const CR4_PAE: u32 = 1 << 5;
const CR4_OSFXSR: u32 = 1 << 9;
const CR4_OSXMMEXCPT: u32 = 1 << 10;
const MSR_EFER: u32 = 0xc000_0080;
const EFER_LONG_MODE: u32 = 1 << 8;
const PAGE_PRESENT_WRITABLE: u32 = 0b11;
const PAGE_HUGE: u32 = 1 << 7;

// Xen's elfnote.h: XEN_ELFNOTE_PHYS32_ENTRY.
const PHYS32_ENTRY: u32 = 18;

global_asm!(
    ".pushsection .note.pvh, \"a\", @note",
    ".balign 4",
    ".long 4, 8, {phys32_entry}",
    ".asciz \"Xen\"",
    ".quad pvh_start",
    ".popsection",
    //
    ".pushsection .rodata.boot, \"a\"",
    ".balign 8",
    "boot_gdt:",
    ".quad 0",
    ".quad 0x00209b0000000000", // 0x08: code, 64 bit
    ".quad 0x0000930000000000", // 0x10: data
    "boot_gdt_pointer:",
    ".word . - boot_gdt - 1",
    ".long boot_gdt",
    ".popsection",
    //
    ".pushsection .bss.boot, \"aw\", @nobits",
    ".balign 4096",
    "boot_pml4: .skip 4096",
    "boot_pdpt: .skip 4096",
    "boot_pd: .skip 4096",
    ".popsection",
    //
    // PVH: 32 bit, flat segments, no paging, no stack.
    ".pushsection .text.boot, \"ax\"",
    ".code32",
    ".global pvh_start",
    "pvh_start:",
    "cli",
    "cld",
    "mov edi, offset __bss_start",
    "mov ecx, offset __bss_end",
    "sub ecx, edi",
    "xor eax, eax",
    "rep stosb",
    "mov esp, offset __stack_top",
    //
    "mov eax, offset boot_pdpt",
    "or eax, {present_writable}",
    "mov dword ptr [boot_pml4], eax",
    "mov eax, offset boot_pd",
    "or eax, {present_writable}",
    "mov dword ptr [boot_pdpt], eax",
    // From 1: the first 2 MiB stay unmapped (bare.ld says why).
    "mov ecx, 1",
    "2:",
    "mov eax, ecx",
    "shl eax, 21",
    "or eax, {huge_page}",
    "mov dword ptr [boot_pd + ecx * 8], eax",
    "inc ecx",
    "cmp ecx, 512",
    "jne 2b",
    //
    "mov eax, offset boot_pml4",
    "mov cr3, eax",
    "mov eax, cr4",
    "or eax, {cr4}",
    "mov cr4, eax",
    "mov ecx, {efer}",
    "rdmsr",
    "or eax, {long_mode}",
    "wrmsr",
    "mov eax, cr0",
    "and eax, {cr0_keep}",
    "or eax, {cr0_set}",
    "mov cr0, eax",
    "lgdt [boot_gdt_pointer]",
    "push 0x08",
    "mov eax, offset boot_long_mode",
    "push eax",
    "retf",
    //
    ".code64",
    "boot_long_mode:",
    "mov eax, 0x10",
    "mov ds, eax",
    "mov es, eax",
    "mov fs, eax",
    "mov gs, eax",
    "mov ss, eax",
    // The upper halves of registers are undefined after the change of mode.
    "mov esp, offset __stack_top",
    "xor ebp, ebp",
    "call {main}",
    "ud2",
    ".popsection",
    phys32_entry = const PHYS32_ENTRY,
    present_writable = const PAGE_PRESENT_WRITABLE,
    huge_page = const PAGE_HUGE | PAGE_PRESENT_WRITABLE,
    cr4 = const CR4_PAE | CR4_OSFXSR | CR4_OSXMMEXCPT,
    efer = const MSR_EFER,
    long_mode = const EFER_LONG_MODE,
    cr0_keep = const !CR0_EMULATE_FPU,
    cr0_set = const CR0_PROTECTED | CR0_MONITOR_COPROCESSOR | CR0_PAGING,
    main = sym main,
);

extern "C" fn main() -> ! {
    let passed = freestanding::run(&mut Serial);
    exit(if passed { EXIT_PASSED } else { EXIT_FAILED })
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Serial, "{info}");
    exit(EXIT_FAILED)
}

/// COM1 as QEMU presents it: no line speed to set.
struct Serial;

impl Serial {
    fn wait(&self, status: u8) {
        while read_port(COM1_LINE_STATUS) & status == 0 {}
    }
}

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.wait(LINE_HOLDING_EMPTY);
            // SAFETY: COM1 belongs to this program, and a write to it touches no memory.
            unsafe { asm!("out dx, al", in("dx") COM1, in("al") byte, options(nomem, nostack, preserves_flags)) };
        }
        Ok(())
    }
}

fn exit(code: u32) -> ! {
    Serial.wait(LINE_ALL_SENT);
    // SAFETY: nothing else is at this port; where there is no such device the processor stops for ever.
    unsafe { asm!("out dx, eax", "2: hlt", "jmp 2b", in("dx") EXIT_PORT, in("eax") code, options(noreturn)) }
}

fn read_port(port: u16) -> u8 {
    let value;
    // SAFETY: only the status of COM1 is read, which touches no memory.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack, preserves_flags)) };
    value
}

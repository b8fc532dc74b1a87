//! Packets of other implementations: every field is found in them, their ICRC is right, and the same comes out again.

use std::collections::HashMap;

use verbring_sim::packet::{Header, ICRC_BYTES, Ip, MAX_PACKET, Opcode};

/// The MigReq bit of the second byte: NICs set it, we do not, and nobody looks at it here.
const MIG_REQ: u8 = 0x40;

struct Golden {
    name: String,
    fields: HashMap<String, u64>,
    icrc: [u8; ICRC_BYTES],
    bytes: Vec<u8>,
}

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).map(|two| u8::from_str_radix(str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Every packet of a fixture: a line of its name and fields, and one of its bytes.
fn golden(text: &str) -> Vec<Golden> {
    let mut packets = Vec::new();
    let mut said = "";
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix('#') {
            said = comment;
            continue;
        }
        let (name, rest) = said.split_once(" | opcode ").expect("a name, and fields");
        let mut fields = HashMap::new();
        fields.insert("opcode".to_string(), number(&rest[..4]).expect("an opcode"));
        let mut icrc = None;
        for (key, value) in rest.split(' ').filter_map(|word| word.split_once('=')) {
            // Both are bytes in the order of the wire.
            match key {
                "icrc" => icrc = hex(value).try_into().ok(),
                "imm" | "ieth" => drop(fields.insert("imm".into(), u64::from_str_radix(value, 16).unwrap())),
                _ => drop(fields.insert(key.into(), number(value).unwrap_or_else(|| panic!("{key}={value}")))),
            }
        }
        let (name, icrc) = (name.trim().to_string(), icrc.expect("an ICRC"));
        packets.push(Golden { name, fields, icrc, bytes: hex(line) });
    }
    packets
}

fn all() -> Vec<Golden> {
    let mut packets = golden(include_str!("golden/rxe.txt"));
    packets.extend(golden(include_str!("golden/published.txt")));
    packets
}

#[test]
fn the_icrc_is_right() {
    let mut count = 0;
    for Golden { name, icrc, bytes, .. } in all() {
        let (ip, packet) = Ip::parse(&bytes).unwrap_or_else(|| panic!("{name}: no RoCEv2 packet"));
        assert_eq!(packet.last_chunk(), Some(&icrc), "{name}");
        assert!(ip.is_intact(packet), "{name}");
        // As a UDP socket has it, which does not see the identification.
        assert!(Ip { identification: None, ..ip }.is_intact(packet), "{name}");
        if let (true, Some(identification)) = (ip.source.is_ipv4(), ip.identification) {
            let other = Some(identification.wrapping_add(1));
            assert!(!Ip { identification: other, ..ip }.is_intact(packet), "{name}");
        }
        assert!(!Ip { source_port: ip.source_port ^ 1, ..ip }.is_intact(packet), "{name}");
        for at in 0..packet.len() {
            let mut damaged = packet.to_vec();
            damaged[at] ^= 0x10;
            // The fifth byte has the marks of congestion, which change on the way.
            assert_eq!(ip.is_intact(&damaged), at == 4, "{name}: byte {at}");
        }
        count += 1;
    }
    assert_eq!(count, 41);
}

#[test]
fn every_field_is_found() {
    let mut seen = Vec::new();
    for Golden { name, fields, bytes, .. } in all() {
        let field = |key: &str| fields.get(key).copied().unwrap_or(0);
        let (_, packet) = Ip::parse(&bytes).unwrap();
        let Some(opcode) = Opcode::from_raw(field("opcode") as u8) else {
            // Not of a reliable connection.
            assert!(Header::parse(packet).is_none(), "{name}");
            continue;
        };
        let (header, payload) = Header::parse(packet).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(header.opcode, opcode, "{name}");
        assert_eq!((u64::from(header.psn), u64::from(header.dest_qp)), (field("psn"), field("dqpn")), "{name}");
        assert_eq!((header.ack_request, header.solicited), (field("ackreq") == 1, field("se") == 1), "{name}");
        assert_eq!(u64::from(header.pkey), fields.get("pkey").copied().unwrap_or(0xffff), "{name}");
        assert_eq!((header.address, u64::from(header.rkey)), (field("va"), field("rkey")), "{name}");
        assert_eq!((u64::from(header.length), u64::from(header.imm)), (field("dmalen"), field("imm")), "{name}");
        assert_eq!((header.value, header.compare), (field("swap_or_add") | field("orig"), field("cmp")), "{name}");
        assert_eq!(u64::from(header.msn), field("msn"), "{name}");
        if fields.contains_key("syndrome") {
            assert_eq!(u64::from(packet[12]), field("syndrome"), "{name}");
        }
        let pad = payload.len().wrapping_neg() % 4;
        assert_eq!(pad as u64, field("pad"), "{name}");
        let len = opcode.header_bytes() + payload.len() + pad + ICRC_BYTES;
        assert_eq!(len, packet.len(), "{name}");
        seen.push(opcode);
    }
    let missing: Vec<_> = Opcode::ALL.iter().filter(|opcode| !seen.contains(opcode)).collect();
    assert_eq!(missing, [&Opcode::SendLastInvalidate], "opcodes without a packet");
}

#[test]
fn the_same_comes_out_again() {
    let mut with_mig_req = 0;
    for Golden { name, fields, bytes, .. } in all() {
        let (ip, packet) = Ip::parse(&bytes).unwrap();
        let Some((header, payload)) = Header::parse(packet) else { continue };
        let mut again = vec![0xee; MAX_PACKET];
        let at = header.opcode.header_bytes();
        again[at..at + payload.len()].copy_from_slice(payload);
        let len = header.seal(&mut again, payload.len(), &ip).unwrap();
        again.truncate(len);
        if fields.get("migreq") == Some(&1) {
            with_mig_req += 1;
            again[1] |= MIG_REQ;
            let body = len - ICRC_BYTES;
            let icrc = ip.icrc(&again[..body]).to_le_bytes();
            again[body..].copy_from_slice(&icrc);
        }
        assert_eq!(again, packet, "{name}");
    }
    assert_eq!(with_mig_req, 2);
}

"""A certificate authority, the server's certificate and a key for each client, made on the spot.

For parties without an authority of their own. Whoever has one puts its files in the same places.
"""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from semifed.errors import UserError

YEARS = 5
LONGEST_NAME = 64  # letters of a common name


class Authority(NamedTuple):
    """Who signs the server's certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


class Pair(NamedTuple):
    """A secret and what may be shown of it."""

    private: bytes
    public: bytes


def new_authority(name: str) -> Authority:
    """An authority of one's own."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:LONGEST_NAME])])
    builder = _builder(subject, subject, key).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = builder.add_extension(usage, critical=True)
    return Authority(key, builder.sign(key, hashes.SHA384()))


def server_certificate(authority: Authority, hosts: Iterable[str]) -> Pair:
    """A key and the certificate that lets the server be known by these names and addresses, as PEM."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = list(dict.fromkeys(hosts))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:LONGEST_NAME])])
    issuer = authority.certificate.subject
    builder = (
        _builder(subject, issuer, key)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    return Pair(private_pem(key), builder.sign(authority.key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def client_key() -> Pair:
    """A key by which Flower knows a client, in OpenSSH's form."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return Pair(private, public)


def public_pem(line: str) -> bytes:
    """The public key of such a line as PEM, the form in which Flower tells who a node is."""
    try:
        key = serialization.load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"'{line[:40]}...' is not a public key: {error}") from None
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)

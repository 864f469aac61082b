"""What proves who is who: a certificate authority, the server's certificate, and a key pair for every site."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

YEARS = 2
SECRET = 0o600


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """ca.pem for everybody, server.pem and server.key for the server; the authority's own key is thrown away."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    root = _name("FedAlloy deployment")
    ca = (
        _certificate(root, root, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA384())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    server = (
        _certificate(_name(hosts[0]), root, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(issuer, critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_secret(
        folder / "server.key",
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        ),
    )


def make_site_key(folder: Path) -> None:
    """A site's key pair in OpenSSH's ECDSA format, as `ssh-keygen -t ecdsa -b 384` makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_secret(folder / "key", private)
    (folder / "key.pub").write_bytes(public + b"\n")


def _write_secret(path: Path, blob: bytes) -> None:
    path.touch(mode=SECRET)
    path.chmod(SECRET)
    path.write_bytes(blob)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )

"""What proves who is who: a certificate authority, the server's certificate, and a key pair for every site."""

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedalloy.core.files import write_whole
from fedalloy.errors import FedAlloyError

YEARS = 2
SECRET = 0o600


@contextlib.contextmanager
def for_owner_only() -> Iterator[None]:
    """What is written meanwhile is for its owner alone, whatever the umask was."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """ca.pem for everybody; for the server alone server.pem and server.key, and ca.key, which signs its next one."""
    with for_owner_only():
        folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP384R1())
    write_whole(folder / "ca.pem", _authority(authority), SECRET)
    write_whole(folder / "ca.key", _pem(authority), SECRET)
    _certify(folder, authority, [_host(host) for host in hosts])


def renew_certificate(folder: Path) -> datetime.datetime:
    """A new key and certificate for the same hosts, signed by the authority; the day it is valid to."""
    file = folder / "ca.key"
    if not file.exists():
        raise FedAlloyError(
            f"{file} is not there, and only it can sign: put it back, or type: fedalloy deploy renew DIR --authority"
        )
    try:
        authority = serialization.load_pem_private_key(file.read_bytes(), None)
        names = _server(folder).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise FedAlloyError(f"{folder} holds no certificates of 'fedalloy deploy init': {error}") from None
    if not isinstance(authority, ec.EllipticCurvePrivateKey):
        raise FedAlloyError(f"{file} is no key of 'fedalloy deploy init'")
    _certify(folder, authority, list(names))
    return valid_until(folder / "server.pem")


def renew_authority(folder: Path, sites: Path) -> datetime.datetime:
    """Another authority beside the old one in every ca.pem; the next certificate of the server is signed by it."""
    file, new = folder / "ca.pem", ec.generate_private_key(ec.SECP384R1())
    try:
        old = x509.load_pem_x509_certificates(file.read_bytes())[-1:]  # of a change before this one the newer
    except (OSError, ValueError) as error:
        raise FedAlloyError(f"{file} holds no certificate: {error}") from None
    both = b"".join(one.public_bytes(serialization.Encoding.PEM) for one in old) + _authority(new)
    write_whole(folder / "ca.key", _pem(new), SECRET)
    for place in (folder, *(one for one in sorted(sites.glob("site-*")) if one.is_dir())):
        write_whole(place / "ca.pem", both, SECRET)
    return max(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(both))


def ends_of(folder: Path) -> dict[str, datetime.datetime]:
    """When the server's certificate ends, and the authority that signed it."""
    server = _server(folder)
    issuers = x509.load_pem_x509_certificates((folder / "ca.pem").read_bytes())
    ends = {"server.pem": server.not_valid_after_utc}
    for one in issuers:
        try:
            server.verify_directly_issued_by(one)
        except (ValueError, TypeError, InvalidSignature):
            continue
        ends["ca.pem"] = one.not_valid_after_utc
    return ends


def _server(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())


def valid_until(file: Path) -> datetime.datetime:
    """The end of a certificate."""
    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc


def _authority(key: ec.EllipticCurvePrivateKey) -> bytes:
    root = _name("FedAlloy deployment")
    certificate = (
        _certificate(root, root, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _certify(folder: Path, authority: ec.EllipticCurvePrivateKey, hosts: list[x509.GeneralName]) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    first = hosts[0]
    server = (
        _certificate(_name(str(first.value)[:64]), _name("FedAlloy deployment"), key.public_key())
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(issuer, critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .sign(authority, hashes.SHA384())
    )
    write_whole(folder / "server.key", _pem(key), SECRET)
    write_whole(folder / "server.pem", server.public_bytes(serialization.Encoding.PEM), SECRET)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def make_site_key(folder: Path) -> None:
    """A site's key pair in OpenSSH's ECDSA format, as `ssh-keygen -t ecdsa -b 384` makes it."""
    with for_owner_only():
        folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_whole(folder / "key", private, SECRET)
    write_whole(folder / "key.pub", public + b"\n", SECRET)


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

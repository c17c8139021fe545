"""Decides which methods may run at a site, checks the client that the site's `site.py` builds, and describes it for the
server.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from polyfed.algorithms import get
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.messages.lora import adapter_averaging_mode, architecture_key_without_averaged_lora_ranks
from polyfed.core.methods.capabilities import BringsNetwork
from polyfed.core.methods.declared_words import CONSENT
from polyfed.core.nn.module_cache import architectures_differ_only_in_frozen_values, cached_module
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection, noise_incompatibility_error
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.handshake import check_public_inputs, input_spec_by_part
from polyfed.deploy.protocol.wire import COUNTING_PROTOCOL, DATA_SPEC_REQUIREMENTS, PROTOCOL, find_first_importable_name
from polyfed.deploy.site.look import LOOK_NAME, build_look_if_owner_allows
from polyfed.deploy.site.preprocessing import MOMENTS_NAME
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.clients.client_init import check_client_init
from polyfed.simulation.rounds.columns.federated_preprocessing import Moments
from polyfed.simulation.rounds.replies.secure_aggregation import effective_disclosures, supports_secure_sum


def check_protocol(head: Mapping[str, Any]) -> None:
    """Raises a `RefusalError` if the server of a message may mean something else by it than this site."""
    if (number := head.get("protocol")) not in (PROTOCOL, COUNTING_PROTOCOL):
        raise RefusalError(
            f"the server speaks protocol {number!r}, this site {PROTOCOL} and {COUNTING_PROTOCOL}; both need versions of "
            "polyfed that fit"
        )


def build_allowed_algorithm(
    head: Mapping[str, Any],
    *,
    methods: frozenset[str] | None,
    secure_only: bool,
    allow_disclosure: bool,
    protection: ReplyProtection,
    allow_look: bool = False,
) -> Algorithm[Any, Any]:
    """Builds the method that a message's header names.

    Args:
        head: header of an envelope from the server.
        methods: names of the allowed methods; None allows all.
        secure_only: whether the site takes part in secure sums only.
        allow_disclosure: whether the server may learn weights or architecture.
        protection: the site's clipping and noise.
        allow_look: whether the server may look at the columns of the site's data.

    Raises:
        RefusalError: the owner does not allow the method.
        UserError: there is no such method, or it does not have these fields.
    """
    fields = dict(head["algorithm"])
    name = str(fields.pop("name"))
    secure = bool(head.get("secure"))
    if secure_only and not secure:
        raise RefusalError("this site takes part in secure sums only (secure=true in its node-config)")
    if name == LOOK_NAME:  # has a consent of its own
        return build_look_if_owner_allows(fields, secure=secure, owner_consents=allow_look, protection=protection)
    # The site's own table decides later whether `Moments` may run.
    algorithm = Moments() if name == MOMENTS_NAME else _build_registered(name, fields, methods)
    if secure and not supports_secure_sum(algorithm):
        raise RefusalError(f"{name} needs each site's message by itself, and has no secure sums")
    if not allow_disclosure and (disclosures := sorted(effective_disclosures(algorithm, secure) & CONSENT)):
        raise RefusalError(
            f"{name} discloses {' and '.join(disclosures)} to the server, which this site does not allow "
            "(allow-disclosure)"
        )
    trains_with_privacy = getattr(algorithm, "privacy", None) is not None
    if trains_with_privacy and protection.noise_multiplier:
        raise RefusalError(
            "this site has noise-multiplier, which hides its whole data set and so each example; run without privacy, or "
            "the site takes noise-multiplier out"
        )
    if protection.protects_units and not trains_with_privacy and name != MOMENTS_NAME:
        raise RefusalError(
            "this site has max-epsilon for each example or patient, and takes part with privacy only; set "
            "algorithm.privacy.target_epsilon"
        )
    if protection.noise_multiplier and (incompatibility := noise_incompatibility_error(algorithm, secure)):
        raise RefusalError(f"this site adds noise, and {incompatibility}")
    return algorithm


def _build_registered(name: str, fields: Mapping[str, Any], methods: frozenset[str] | None) -> Algorithm[Any, Any]:
    if methods is not None and name not in methods:
        raise RefusalError(f"this site runs {', '.join(sorted(methods))} only, not {name}")
    if code := find_first_importable_name(fields):
        raise RefusalError(f"{name} would load {code!r} at this site, which runs no code that the server names")
    try:
        algorithm: Algorithm[Any, Any] = get(name)(**fields)
    except (UserError, TypeError, ValueError) as error:  # it depends on the server's words alone
        raise RefusalError(
            f"polyfed {version('polyfed')} at this site cannot run the server's method: {str(error)[:1000]}; "
            "server and sites need the same version of polyfed"
        ) from error
    return algorithm


def call_client_factory(client_factory: Callable[[], Client], site: str) -> Client:
    """Calls the function `client` of a site's `site.py` and returns the client.

    Raises:
        UserError: the function returns no client, one with another id than the site, or one whose labels are texts.
    """
    client = client_factory()
    if not isinstance(client, Client):
        raise UserError(f"client() of site.py must return a polyfed.Client, got {type(client).__name__}")
    if client.id != site:
        raise UserError(f"client() of site.py returns the client {client.id!r}, but this site is {site!r}")
    if client.train.classes is not None:
        raise UserError(
            "the labels of this site's client are texts, which each site would number by its own classes; number them in "
            "site.py as all sites do: [CLASSES.index(label) for label in labels]"
        )
    return client


def check_client_and_get_architecture(
    client: Client, algorithm: Algorithm[Any, Any], head: Mapping[str, Any], *, clips_updates: bool
) -> str | None:
    """Returns the client's architecture (None if the method's), once it suits method and federation.

    Args:
        client: the site's client.
        algorithm: the method.
        head: header of the introduction.
        clips_updates: whether the site clips its updates.

    Returns:
        The architecture of the client's network; None if the method brings the network.

    Raises:
        RefusalError: the network is not the federation's, or clipping excludes the method.
        UserError: the client does not suit the method.
    """
    if isinstance(algorithm, BringsNetwork):
        requirements.check_clients_suit_method([client], algorithm)
        requirements.check_networks_run([client], factory=algorithm.network_for(requirements.client_data_spec(client)))
    else:
        requirements.check_networks_run([client])
        requirements.check_clients_suit_method([client], algorithm)
    check_client_init([client], algorithm)
    if "public_data" in algorithm.requires and "public" in head:
        check_public_inputs(head["public"], client)
    architecture = None
    if client.model is not None:
        architecture = architecture_key_without_averaged_lora_ranks(algorithm, cached_module(client.model))
    if adapter_averaging_mode(algorithm) is not None and clips_updates:
        raise RefusalError("it clips its updates, and an adapter of its own rank has nothing to be compared with")
    # Decided by the method, not by the header: otherwise a server could ask a site of any method for its architecture.
    if "one_architecture" in algorithm.requires:
        if architectures_differ_only_in_frozen_values(architecture or "", str(head["architecture"])):
            raise RefusalError("its network's frozen parameters are not the federation's; this method needs the same")
        if architecture != head["architecture"]:
            raise RefusalError("its network is not that of the federation, and this method needs one architecture")
    return architecture


def build_introduction_fields(
    client: Client, algorithm: Algorithm[Any, Any], architecture: str | None, *, reveals_example_count: bool
) -> dict[str, Any]:
    """Returns header fields with the facts about a client that the method needs.

    Args:
        client: the site's client.
        algorithm: the method.
        architecture: of the client's network.
        reveals_example_count: whether the server learns the number of training examples.
    """
    needs = algorithm.requires
    fields: dict[str, Any] = {"client": client.id, "task": client.task.spec}
    if reveals_example_count:
        fields["num_examples"] = len(client.train)
    if "architectures" in needs:
        fields["architecture"] = architecture
    if "one_representation" in needs:
        fields["width"] = requirements.representation_width(client)
    if "one_input_spec" in needs:
        fields["inputs"] = input_spec_by_part(client.train.x)
    if needs & DATA_SPEC_REQUIREMENTS:
        spec = requirements.client_data_spec(client)
        # The number of outputs depends on the data's largest label, so it leaves the site only where it is needed.
        fields["form"] = [list(spec.inputs), spec.outputs if "one_data_spec" in needs else 1]
    return fields

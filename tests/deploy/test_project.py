"""What `polyfed flower init` writes: no key for a repository, no path of this machine, names in place of placeholders."""

import datetime
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from cryptography import x509

from polyfed.cli.commands.deploy.doctor_command import check_server_configuration
from polyfed.cli.commands.deploy.flower_command import _last_round_table
from polyfed.cli.main import main
from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import create_project, write_trial_certificates

DOCUMENTS = ("README.md", "OPERATIONS.md")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.deploy.trial.project._write_catalogue", lambda path: path.write_text("{}"))
        return create_project(tmp_path_factory.mktemp("projects") / "hospitals", ["mayo", "bonn"])


def texts(project):
    files = [p for p in project.path.rglob("*") if p.is_file() and p.suffix not in (".key", ".pub", ".crt", ".pem")]
    return {str(file.relative_to(project.path)): file.read_text() for file in files}


def test_nothing_is_left_of_a_template_or_of_this_machine(project):
    for name, text in texts(project).items():
        assert not re.search(r"\$(sites|first|count|folder|here|catalogue)\b", text), name
        assert str(project.path.parent) not in text, name
    for name in DOCUMENTS:
        text = (project.path / name).read_text()
        assert "DIR " not in text.replace("STATE-DIR ", "")
        assert "polyfed flower run hospitals" in text
        assert "mayo.pub" in text or "--name mayo" in text
        assert not re.search(
            r"^    \S", re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("    ssh", ""), re.MULTILINE
        )


@pytest.mark.parametrize("names", ["north,server", "CA,north", "superlink", "north,North"])
def test_sites_whose_files_would_take_the_place_of_others_are_refused(tmp_path, capsys, names):
    assert main(["flower", "init", str(tmp_path / "federation"), "--sites", names]) == 2
    assert re.search("cannot be called|different names", capsys.readouterr().err)
    assert not (tmp_path / "federation").exists()


def test_a_folder_whose_name_is_no_word_is_called_dir(tmp_path, monkeypatch):
    monkeypatch.setattr("polyfed.deploy.trial.project._write_catalogue", lambda path: path.write_text("{}"))
    project = create_project(tmp_path / "our `rm -rf` $sites", ["north"])
    assert "polyfed flower up DIR" in (project.path / "README.md").read_text()


def test_a_repository_takes_no_secret(project):
    """What `git add .` would add, by git itself."""
    (project.path / "trial").mkdir(exist_ok=True)
    for name in (
        "server/control.token",
        "site/site.key",
        "trial/state.db",
        "containers/polyfed-0.1.0-py3-none-any.whl",
    ):
        (project.path / name).touch()
    subprocess.run(["git", "init", "-q"], cwd=project.path, check=True)
    told = subprocess.run(
        ["git", "add", "-An", "."], cwd=project.path, capture_output=True, text=True, check=True
    ).stdout
    added = set(re.findall(r"^add '(.*)'$", told, re.MULTILINE))
    assert {
        "app/pyproject.toml",
        "site/site.py",
        "certificates/mayo.key.pub",
        "certificates/ca.crt",
        ".gitignore",
    } <= added
    assert not [name for name in added if re.search(r"\.key$|token|^trial|^runs|\.whl$", name)]
    for file in project.path.rglob("*.key"):
        assert str(file.relative_to(project.path)) not in added


def test_links_of_the_documents_lead_to_the_project_or_the_site(project):
    for name in DOCUMENTS:
        text = (project.path / name).read_text()
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            if path.startswith("https://polyfed.github.io/polyfed/"):
                page = Path(__file__).parents[2] / "docs" / path.partition("/polyfed/")[2].replace(".html", ".md")
                assert page.exists(), target
            else:
                assert (project.path / path).exists(), target
                titles = re.findall(r"^#+ (.*)$", (project.path / (path or name)).read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert not anchor or anchor in slugs, target


def test_the_page_of_the_documentation_says_the_same(project):
    """But for its names and links."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    written = (project.path / "OPERATIONS.md").read_text().replace("hospitals", "federation").replace("mayo", "north")
    plain = [re.sub(r"\[[^\]]*\]\([^)]*\)|^# .*", "", text, flags=re.MULTILINE) for text in (page, written)]
    assert plain[0] == plain[1]


def test_relative_paths_start_from_the_project(project, monkeypatch, tmp_path):
    """Wherever the command is typed."""
    monkeypatch.chdir(tmp_path)
    config = {"file": "server/server.py", "algorithm.catalogue": "/etc/c.yaml", "rounds": 3}
    found = project.resolve_paths(config)
    assert found == {**config, "file": str(project.path / "server" / "server.py")}
    assert project.resolve_paths({"file": "", "rounds": 1}) == {"file": "", "rounds": 1}
    written = project.read_server_configuration()
    for change in ({}, {"algorithm": {"name": "flha_ghn", "catalogue": "server/catalogue.yaml"}}):
        findings = list(check_server_configuration({**written, **change}, project.app_folder / "pyproject.toml"))
        assert [finding.level for finding in findings] == ["ok"], findings
    (wrong, _) = (
        *check_server_configuration({**written, "file": "server/none.py"}, project.app_folder / "pyproject.toml"), None
    )  # fmt: skip
    assert "none.py does not exist" in wrong.text


def test_the_first_run_needs_nobody_s_consent(project):
    config = tomllib.loads((project.app_folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["secure"] is True
    assert config["allow-disclosure"] is False
    assert "--allow-disclosure" not in re.findall(r"```.*?```", (project.path / "README.md").read_text(), re.DOTALL)[0]


def test_a_table_without_scores_says_why(tmp_path):
    (tmp_path / "manifest.json").write_text('{"sites": ["north"]}')
    for scores, why in (({}, True), ({"accuracy": 0.5}, False)):
        record = {"round": 3, "clients": {"north": {"bytes_up": 1, **scores}}}
        assert ("sites disclose no scores" in _last_round_table(tmp_path, [record]).title) is why


def test_a_trial_makes_its_certificates_anew_when_they_were_deleted(project, monkeypatch):
    old = (project.certificates_folder / "server.pem").read_bytes()
    key = (project.certificates_folder / "mayo.key").read_bytes()

    def stop(*words, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "_start_process", stop)
    monkeypatch.setattr(trials, "_is_port_open", lambda port: False)
    for deleted in (False, True):
        if deleted:
            (project.certificates_folder / "ca.crt").unlink()
        with pytest.raises(KeyboardInterrupt), trials.start_trial(project, ["mayo"]):
            pass
        assert ((project.certificates_folder / "server.pem").read_bytes() == old) is not deleted
    assert (project.certificates_folder / "mayo.key").read_bytes() == key


def test_commands_of_the_documents_are_commands(project, capsys):
    """Each names an action that exists; options are those of its help."""
    commands = {
        command
        for name in DOCUMENTS
        for command in re.findall(r"polyfed flower (\w+[^`#\n;>|]*)", (project.path / name).read_text())
    }
    assert {command.split()[0] for command in commands} >= {"up", "run", "status", "doctor", "health", "init"}
    for command in commands:
        action, *words = command.split()
        assert main(["flower", action, "--help"]) == 0
        shown = capsys.readouterr().out
        for word in words:
            assert not word.startswith("--") or word in shown, command


@pytest.mark.parametrize("name", ["ca.crt", "server.pem"])
def test_a_trial_starts_also_on_a_clock_that_is_set_back(tmp_path, name):
    write_trial_certificates(tmp_path)
    certificate = x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
    assert certificate.not_valid_before_utc < datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=2)

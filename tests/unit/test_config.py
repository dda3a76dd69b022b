"""Settings: each source, their order, origins, and one line per mistake."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from server.cli import run_command
from server.config import Settings, leaves, shown
from server.config_docs import DOCUMENT_PATH, YAML_PATH, with_table, yaml_file
from server.config_sources import SettingsError, load_settings
from server.sections import DEMO_MODEL_NAME, EngineSettings

MEMORY = "sqlite+aiosqlite:///:memory:"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder and an environment without settings."""
    monkeypatch.chdir(tmp_path)
    for leaf in leaves():
        monkeypatch.delenv(leaf.env_name, raising=False)
    monkeypatch.delenv("LAPILLI_CONFIG", raising=False)
    return tmp_path


def write_default_file(folder, text):
    (folder / "configs").mkdir()
    (folder / "configs" / "lapilli.yaml").write_text(text, encoding="utf-8")


def test_defaults_are_the_tree_alone(folder):
    loaded = load_settings([], {"HOME": "/home/a"}, folder)
    assert loaded.settings.gateway.port == 8000
    assert loaded.settings.auth.database_url == "sqlite+aiosqlite:////home/a/.local/state/lapilli/lapilli.db"
    assert set(loaded.origins.values()) == {"default"}
    assert set(loaded.origins) == {leaf.path for leaf in leaves()}


def test_state_folder_follows_xdg_unless_relative(folder):
    absolute = load_settings([], {"HOME": "/home/a", "XDG_STATE_HOME": "/var/s"}, folder)
    relative = load_settings([], {"HOME": "/home/a", "XDG_STATE_HOME": "s"}, folder)
    assert absolute.settings.auth.database_url == "sqlite+aiosqlite:////var/s/lapilli/lapilli.db"
    assert relative.settings.auth.database_url.startswith("sqlite+aiosqlite:////home/a/")


def test_each_source_beats_the_one_before(folder):
    write_default_file(folder, "gateway: {port: 1, host: file}\nengine: {model: m}\nlog:\n")
    env = {"LAPILLI_GATEWAY__PORT": "2", "LAPILLI_GATEWAY__HOST": "env"}
    loaded = load_settings(["--port", "3"], env, folder)
    assert (loaded.settings.gateway.port, loaded.settings.gateway.host) == (3, "env")
    assert loaded.settings.engine.model == "m"
    assert loaded.origins["gateway.port"] == "flag --port"
    assert loaded.origins["gateway.host"] == "env LAPILLI_GATEWAY__HOST"
    assert loaded.origins["engine.model"] == "configs/lapilli.yaml"
    assert loaded.origins["log.level"] == "default"


def test_long_and_short_flags_are_one_setting_and_the_last_wins(folder):
    loaded = load_settings(["--port", "3", "--gateway.port=4"], {}, folder)
    assert (loaded.settings.gateway.port, loaded.origins["gateway.port"]) == (4, "flag --gateway.port")


def test_named_file_by_flag_beats_the_variable_and_replaces_the_default_file(folder):
    write_default_file(folder, "gateway: {host: default-file}")
    (folder / "a.yaml").write_text("gateway: {port: 1}")
    (folder / "b.yaml").write_text("gateway: {port: 2}")
    by_variable = load_settings([], {"LAPILLI_CONFIG": "a.yaml"}, folder)
    by_flag = load_settings(["--config", "b.yaml"], {"LAPILLI_CONFIG": "a.yaml"}, folder)
    assert (by_variable.settings.gateway.port, by_variable.origins["gateway.port"]) == (1, "a.yaml")
    assert (by_flag.settings.gateway.port, by_flag.settings.gateway.host) == (2, "127.0.0.1")


@pytest.mark.parametrize("leaf", list(leaves()), ids=lambda leaf: leaf.path)
def test_every_setting_can_be_set_by_file_environment_and_every_flag(leaf, folder):
    default = shown("", leaf.field.get_default(call_default_factory=True))
    value = {"null": "7", "{}": '{"a": "1"}'}.get(default, default)
    value = {"engine.enforce_eager": "true", "audit.hec_url": "https://c:8088"}.get(leaf.path, value)
    if leaf.path in ("jwt.issuer", "jwt.jwks_url"):
        value = "https://login.example"
    (folder / "f.yaml").write_text(
        yaml.safe_dump({leaf.path.split(".")[0]: {leaf.path.split(".")[1]: value}})
    )
    by_env = load_settings([], {leaf.env_name: value}, folder)
    assert by_env.origins[leaf.path] == f"env {leaf.env_name}"
    by_flags = [load_settings([flag, value], {}, folder).settings for flag in leaf.flags]
    assert all(settings == by_env.settings for settings in by_flags)
    by_file = load_settings(["--config", "f.yaml"], {}, folder)
    assert by_file.origins[leaf.path] == "f.yaml"
    assert by_file.settings == by_env.settings


def test_null_unsets_what_the_file_sets(folder):
    write_default_file(folder, "engine: {max_model_len: 9}")
    assert load_settings([], {}, folder).settings.engine.max_model_len == 9
    assert load_settings(["--max-model-len", "null"], {}, folder).settings.engine.max_model_len is None
    env = {"LAPILLI_ENGINE__MAX_MODEL_LEN": "null"}
    assert load_settings([], env, folder).settings.engine.max_model_len is None


def test_engine_args_are_replaced_as_a_whole(folder):
    write_default_file(folder, "engine: {args: {a: 1}}")
    assert load_settings([], {}, folder).settings.engine.args == {"a": 1}
    assert load_settings(["--engine.args", '{"b": [2]}'], {}, folder).settings.engine.args == {"b": [2]}


def test_variables_of_others_with_our_prefix_are_left_alone(folder):
    env = {
        "LAPILLI_API_KEY": "x",
        "LAPILLI_SERVICE_HOST": "10.0.0.1",
        "LAPILLI_SERVICE_PORT": "8000",
        "LAPILLI_SERVICE_PORT_HTTP": "8000",
        "LAPILLI_PORT": "tcp://10.0.0.1:8000",
        "LAPILLI_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "LAPILLI_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert set(load_settings([], env, folder).origins.values()) == {"default"}


BAD_FILES = {
    "key": (
        "gateway:\n  prot: 9000\n",
        "bad.yaml: unknown key gateway.prot; did you mean gateway.port?",
    ),
    "section": ("gatewey:\n  port: 9000\n", "bad.yaml: unknown key gatewey; did you mean gateway?"),
    "nothing near": ("zzz: 1\n", "bad.yaml: unknown key zzz"),
    "key at the top": (
        "gateway.port: 1\n",
        "bad.yaml: gateway.port must be written as a key under its section",
    ),
    "number key": ("gateway: {1: 2}\n", "bad.yaml: unknown key gateway.1; did you mean gateway.port?"),
    "bounds": (
        "gateway:\n  port: 70000\n",
        "gateway.port = 70000 (bad.yaml): Input should be less than or equal to 65535",
    ),
    "type": (
        "gateway:\n  port: eighty\n",
        "gateway.port = eighty (bad.yaml): "
        "Input should be a valid integer, unable to parse string as an integer",
    ),
    "not a number": (
        "stub:\n  ttft_ms: .nan\n",
        "stub.ttft_ms = NaN (bad.yaml): Input should be a finite number",
    ),
    "choice": (
        "log: {format: xml}\n",
        "log.format = xml (bad.yaml): Input should be 'auto', 'json' or 'console'",
    ),
    "two wrong": (
        "gateway: {port: -1, sse_ping_s: 0}\n",
        "gateway.port = -1 (bad.yaml): Input should be greater than or equal to 0 (and 1 more)",
    ),
    "section is text": ("gateway: 9000\n", "bad.yaml: gateway must hold keys and values, not a number"),
    "list": (
        "- 1\n",
        "bad.yaml: must hold sections (gateway, admin, engine, selfcheck, requests, batch, stub, auth, jwt, "
        "limits, audit, log), not a list",
    ),
    "twice": ("log: {level: info}\nlog: {}\n", "bad.yaml: not YAML (key log appears twice, line 2)"),
    "syntax": ("gateway: [1\n", "bad.yaml: not YAML (expected ',' or ']', but got '<stream end>', line 2)"),
    "tag": (
        "log: !!python/object:os.system {}\n",
        "bad.yaml: not YAML (could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system', line 1)",
    ),
    "password": (
        "auth: {database_url: 'postgresql://u:hunter2@h/d'}\n",
        "auth.database_url = postgresql://u:***@h/d (bad.yaml): "
        "the driver is not async (for SQLite write sqlite+aiosqlite)",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_one_line_and_exit_2(text, message, folder, capsys):
    (folder / "bad.yaml").write_text(text)
    assert run_command(["config", "--config", "bad.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"lapilli: error: {message}\n"
    assert captured.out == ""


BAD_FLAGS = {
    "unknown": (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
    "unknown long": (["--gateway.prot", "1"], "unknown flag --gateway.prot; did you mean --gateway.port?"),
    "no value": (["--port"], "Option '--port' requires an argument."),
    "word": (["now"], "Got unexpected extra argument (now)"),
    "missing file": (["--config", "none.yaml"], "none.yaml: cannot be read (No such file or directory)"),
    "folder": (["--config", "."], ".: cannot be read (Is a directory)"),
    "value": (["--engine", "tgi"], "engine.kind = tgi (flag --engine): Input should be 'vllm' or 'stub'"),
    "boolean": (
        ["--engine.enforce_eager", "maybe"],
        "engine.enforce_eager = maybe (flag --engine.enforce_eager): "
        "Input should be a valid boolean, unable to interpret input",
    ),
    "origin with a path": (
        ["--gateway.cors_origins", "https://a.example/"],
        "gateway.cors_origins = https://a.example/ (flag --gateway.cors_origins): "
        "an origin is scheme://host or scheme://host:port in lower case, or *",
    ),
    "host for an origin": (
        ["--gateway.cors_origins", "https://a.example,b.example"],
        "gateway.cors_origins = https://a.example,b.example (flag --gateway.cors_origins): "
        "an origin is scheme://host or scheme://host:port in lower case, or *",
    ),
    "credentials for all": (
        ["--gateway.cors_origins", "*", "--gateway.cors_allow_credentials", "true"],
        "gateway.cors_allow_credentials = true (flag --gateway.cors_allow_credentials): "
        "not with cors_origins *: any page could act with its visitor's cookies",
    ),
    "json": (
        ["--engine.args", "{'hf_token': 'hunter2'}"],
        "engine.args = *** (flag --engine.args): "
        "not JSON (Expecting property name enclosed in double quotes at character 1)",
    ),
}


@pytest.mark.parametrize("command", ["config", "serve"])
@pytest.mark.parametrize(("argv", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_bad_flag_is_one_line_and_exit_2(argv, message, command, folder, capsys):
    assert run_command([command, *argv]) == 2
    assert capsys.readouterr().err == f"lapilli: error: {message}\n"
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, {}, folder)
    assert str(caught.value) == message


BAD_VARIABLES = {
    "unknown": (
        ("LAPILLI_GATEWAY__PROT", "1"),
        "unknown environment variable LAPILLI_GATEWAY__PROT; did you mean LAPILLI_GATEWAY__PORT?",
    ),
    "one underscore": (
        ("LAPILLI_GATEWAY_PORT", "1"),
        "unknown environment variable LAPILLI_GATEWAY_PORT; did you mean LAPILLI_GATEWAY__PORT?",
    ),
    "small letters": (
        ("lapilli_gateway__port", "1"),
        "unknown environment variable lapilli_gateway__port; did you mean LAPILLI_GATEWAY__PORT?",
    ),
    "value": (
        ("LAPILLI_GATEWAY__PORT", ""),
        "gateway.port =  (env LAPILLI_GATEWAY__PORT): "
        "Input should be a valid integer, unable to parse string as an integer",
    ),
    "bounds": (
        ("LAPILLI_GATEWAY__MAX_BODY_BYTES", "1000"),
        "gateway.max_body_bytes = 1000 (env LAPILLI_GATEWAY__MAX_BODY_BYTES): "
        "Input should be greater than or equal to 1048576",
    ),
}


@pytest.mark.parametrize(("variable", "message"), BAD_VARIABLES.values(), ids=BAD_VARIABLES)
def test_bad_variable_is_one_line_and_exit_2(variable, message, folder, monkeypatch, capsys):
    monkeypatch.setenv(*variable)
    assert run_command(["config"]) == 2
    assert capsys.readouterr().err == f"lapilli: error: {message}\n"


BAD_DATABASE_URLS = {
    "sqlite:///x.db": "the driver is not async (for SQLite write sqlite+aiosqlite)",
    "sqlite+nothing:///x.db": "SQLAlchemy knows no such database driver",
    "mysql+asyncmy://u:***@h/d": "the driver is not installed (No module named 'asyncmy')",
    "postgresql+asyncpg://u:***@h:port/d": "not an SQLAlchemy URL",
    "x.db": "not an SQLAlchemy URL",
}


@pytest.mark.parametrize(("url", "reason"), BAD_DATABASE_URLS.items())
def test_bad_database_url_is_refused_without_its_password(url, reason, folder):
    with pytest.raises(SettingsError) as caught:
        load_settings(["--auth.database_url", url.replace("***", "hunter2")], {}, folder)
    assert str(caught.value) == f"auth.database_url = {url} (flag --auth.database_url): {reason}"


@given(st.binary(max_size=200))
def test_any_file_loads_or_is_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "f.yaml"
    path.write_bytes(content)
    message = ""
    try:
        load_settings(["--config", str(path)], {})
    except SettingsError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


def test_file_that_is_not_utf8(folder):
    (folder / "f.yaml").write_bytes(b"log: {level: \xe9}")
    with pytest.raises(SettingsError, match=r"^f.yaml: not UTF-8 text$"):
        load_settings(["--config", "f.yaml"], {}, folder)


def test_settings_are_frozen_and_closed():
    with pytest.raises(ValueError, match="frozen"):
        Settings().gateway.port = 1
    with pytest.raises(ValueError, match="Extra inputs"):
        Settings.model_validate({"gateway": {"prot": 1}})


def test_public_model_name(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert EngineSettings().public_model_name == DEMO_MODEL_NAME
    assert EngineSettings(model=f"{tmp_path}/my-model/").public_model_name == "my-model"
    assert EngineSettings(model="org/name").public_model_name == "org/name"
    assert EngineSettings(model="org/name", served_model_name="n").public_model_name == "n"


def test_database_password_is_in_no_repr():
    settings = Settings.model_validate({"auth": {"database_url": "sqlite+aiosqlite://u:hunter2@h/d"}})
    assert "hunter2" not in repr(settings)


def test_shown_masks_secrets():
    assert shown("auth.database_url", "a+b://u:p@s:s@h/d") == "a+b://u:***@h/d"
    args = {"seed": 1, "hf_token": "x", "deep": [{"api_key": "x"}]}
    masked = {"seed": 1, "hf_token": "***", "deep": [{"api_key": "***"}]}
    assert json.loads(shown("engine.args", args)) == masked


def test_documented_file_is_in_step_and_its_lines_are_the_defaults(folder):
    text = (ROOT / YAML_PATH).read_text(encoding="utf-8")
    assert text == yaml_file(), "run python -m server.config_docs"
    uncommented = re.sub(r"^  # (\w+: )", r"  \1", text, flags=re.MULTILINE)
    (folder / "all.yaml").write_text(uncommented)
    own = {"auth.database_url": MEMORY, "audit.file": "a.jsonl", "audit.spool_dir": "spool"}
    flags = [word for path, value in own.items() for word in (f"--{path}", value)]
    loaded = load_settings(["--config", "all.yaml", *flags], {}, folder)
    assert {path for path, origin in loaded.origins.items() if origin == "all.yaml"} == {
        leaf.path for leaf in leaves()
    } - set(own)
    audit = {"file": "a.jsonl", "spool_dir": "spool"}
    assert loaded.settings == Settings.model_validate({"auth": {"database_url": MEMORY}, "audit": audit})


def test_documents_are_in_step():
    text = (ROOT / DOCUMENT_PATH).read_text(encoding="utf-8")
    assert text == with_table(text), "run python -m server.config_docs"
    assert all(f"| `{leaf.path}` |" in text and leaf.description for leaf in leaves())

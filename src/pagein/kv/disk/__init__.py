"""KV blocks on disk by what is in them: written once, verified at every read, within a cap."""

from pagein.kv.disk.answers import ConversationEntry as ConversationEntry
from pagein.kv.disk.answers import Forgotten as Forgotten
from pagein.kv.disk.answers import Found as Found
from pagein.kv.disk.answers import Kept as Kept
from pagein.kv.disk.answers import Kind as Kind
from pagein.kv.disk.answers import Policy as Policy
from pagein.kv.disk.answers import Ref as Ref
from pagein.kv.disk.answers import Usage as Usage
from pagein.kv.disk.prefix import Prefix as Prefix
from pagein.kv.disk.reading import Hold as Hold
from pagein.kv.disk.store import BlockStore as BlockStore

// The dialog that asks for the service's key.

import { hasKey, keepKey } from "./api.js";
import { byId, setText } from "./elements.js";

/** Waits until the user has entered a key, which may be wrong again. */
export async function askForKey(signal) {
  const dialog = byId("key");
  setText(
    byId("key-problem"),
    hasKey() ? "The service does not know this key. Give another one." : "This service asks for a key. It is kept until this tab is closed.",
  );
  byId("key-value").value = "";
  if (!dialog.open) {
    dialog.showModal();
  }
  const over = new AbortController(); // removes the listeners
  const { promise, resolve, reject } = Promise.withResolvers();
  const given = () => {
    keepKey(byId("key-value").value.trim());
    resolve();
  };
  byId("key-form").addEventListener("submit", given, { signal: over.signal });
  // The page needs a key: closed by Escape, the dialog opens again.
  dialog.addEventListener("close", () => dialog.showModal(), { signal: over.signal });
  signal?.addEventListener("abort", () => reject(signal.reason), { signal: over.signal });
  try {
    await promise;
  } finally {
    over.abort();
  }
}

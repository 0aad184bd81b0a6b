// @ts-check
/** What views are made of: preact with htm in place of JSX, and signals that views follow by reading them. */

export { Fragment } from "../vendor/preact.js";
export { html, render } from "../vendor/htm-preact.js";
export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "../vendor/signals.js";

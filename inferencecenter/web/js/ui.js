// @ts-check
/** UI primitives: preact with htm in place of JSX, and signals to which views subscribe by reading. */

export { Fragment } from "../vendor/preact.js";
export { html, render } from "../vendor/htm-preact.js";
export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "../vendor/signals.js";

